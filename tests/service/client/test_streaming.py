"""Parsing the bytes of a stream into chunks and a result, however the bytes are split."""

import json
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd import Generation, LogitdError, MalformedReplyError, StreamError
from logitd.service.client.streaming import EventDecoder, StreamState
from logitd.service.http import sse
from tests.service.client.test_reading import JSON

HEAD = {
    "id": "gen-1",
    "created": 1,
    "model": "m",
    "checkpoint": {"name": "m", "step": 1, "val_loss": None, "weights_sha256": "ff"},
}
TAIL = {
    "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4, "cached_tokens": 0},
    "seed": 7,
    "timings": {"queue_ms": 0.0, "prefill_ms": 1.0, "decode_ms": 2.0, "ttft_ms": 1.0,
                "tokens_per_second": 3.0},
}  # fmt: skip


def token(token_id: int) -> dict[str, Any]:
    return {"id": token_id, "text": "x", "bytes": [1], "logprob": -0.5, "rank": 1, "top": []}


def choice(index: int, text: str, *ids: int, end: str | None = None) -> dict[str, Any]:
    return {
        "index": index,
        "prompt_index": index,
        "text": text,
        "token_ids": list(ids),
        "seed": 7,
        "tokens": [token(i) for i in ids],
        "finish_reason": end,
        "stop_reason": None if end is None else 9,
    }


def chunk(*choices: Any, **members: Any) -> dict[str, Any]:
    return {**HEAD, "choices": list(choices), **members}


CHUNKS = [
    chunk(choice(0, "a\u2028", 1), prompts=[{"index": 0, "tokens": [token(5)]}]),
    chunk(choice(1, "x\u0085", 2), choice(0, "", 3), new_member=1),
    chunk(prompts=[{"index": 0, "tokens": [token(6)]}]),
    chunk(choice(0, "b", end="stop")),
    chunk(choice(1, "", end="length")),
]
STREAM = b"".join(
    [sse.KEEP_ALIVE, *(sse.event(one) for one in CHUNKS), sse.event(chunk(**TAIL)), sse.DONE]
)


def read_all(stream: bytes, *, cuts: list[int] | None = None) -> tuple[StreamState, list[Any]]:
    """The final state and the chunks of a stream that arrives in pieces."""
    state, chunks = StreamState(), []
    state.request_id = "id-1"
    places = [0, *sorted(cuts or []), len(stream)]
    for start, end in pairwise(places):
        state.push(stream[start:end])
        while (one := state.next()) is not None:
            chunks.append(one)
    return state, chunks


def test_chunks_add_up_to_a_generation() -> None:
    state, chunks = read_all(STREAM)
    assert state.ended
    assert [one.text for one in chunks] == ["a\u2028", "", "", "b", ""]
    result = state.result()
    assert isinstance(result, Generation)
    first, second = result.choices
    assert (first.text, first.token_ids, first.finish_reason, first.stop_reason) == (
        "a\u2028b", (1, 3), "stop", 9,
    )  # fmt: skip
    assert (second.text, second.token_ids, second.finish_reason) == ("x\u0085", (2,), "length")
    assert first.tokens is not None
    assert [one.id for one in first.tokens] == [1, 3]
    assert result.prompts is not None
    assert [[one.id for one in prompt.tokens] for prompt in result.prompts] == [[5, 6]]
    assert asdict(result.usage) == TAIL["usage"]
    assert (result.seed, result.request_id, result.id) == (7, "id-1", "gen-1")
    assert state.text == "a\u2028b"
    assert state.tokens == 3


def test_choices_are_sorted_by_index() -> None:
    chunks = [chunk(choice(i, str(i), i, end="stop")) for i in (2, 0, 1)]
    state, _ = read_all(b"".join(map(sse.event, [*chunks, chunk(**TAIL)])) + sse.DONE)
    assert [one.text for one in state.result().choices] == ["0", "1", "2"]
    assert state.text == "0"


def test_stream_without_its_last_event_has_no_result() -> None:
    state, _ = read_all(STREAM.removesuffix(sse.DONE))
    assert state.tail.seed == 7
    assert not state.ended
    with pytest.raises(StreamError, match="result is incomplete"):
        state.result()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@given(st.lists(st.integers(0, 2 * len(STREAM)), max_size=30))
def test_chunking_and_line_ends_change_nothing(line_end: bytes, cuts: list[int]) -> None:
    stream = STREAM.replace(b"\n", line_end)
    state, chunks = read_all(stream, cuts=[min(cut, len(stream)) for cut in cuts])
    whole, all_chunks = read_all(STREAM)
    assert chunks == all_chunks
    assert state.result() == whole.result()


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\ndata: b\n\n", [b"a\nb"]),
        (b": comment\n\ndata: a\n\n", [b"a"]),
        (b"event: x\nid: 5\ndata: a\nretry: 9\n\n", [b"a"]),
        (b"event: x\n\n\n\n", []),
        (b"data: a\n", []),
        (b"data: \n\n", [b""]),
        (b"data\n\n", [b""]),
        (b"data:  a: b\n\n", [b" a: b"]),
    ],
)
def test_decoder_finds_the_data_of_events(stream: bytes, data: list[bytes]) -> None:
    assert EventDecoder().push(stream) == data
    decoder = EventDecoder()
    bytewise = [decoder.push(bytes([byte])) for byte in stream]
    assert [event for events in bytewise for event in events] == data


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"data: {\n\n", "the event is not JSON"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "the event is not JSON"),
        (b"data: []\n\n", "the reply is a list; it should be an object"),
        (sse.event({}), "id is missing"),
        (sse.event(chunk({"index": 0})), "choices.0.prompt_index is missing"),
        (sse.event(chunk(**{**TAIL, "usage": None})), "usage is null; it should be an object"),
        (sse.DONE, "[DONE] was sent before the usage or any choice"),
        (sse.event(CHUNKS[0]) + sse.DONE, "[DONE] was sent before the usage or any choice"),
        (sse.event(chunk(**TAIL)) + sse.DONE, "[DONE] was sent before the usage or any choice"),
    ],
)  # fmt: skip
def test_unreadable_events_are_named(stream: bytes, message: str) -> None:
    with pytest.raises(MalformedReplyError) as caught:
        read_all(stream)
    assert caught.value.message == f"this client cannot read an event of the stream: {message}"
    assert caught.value.request_id == "id-1"


def test_errors_of_a_stream_count_its_tokens() -> None:
    state, _ = read_all(STREAM[: STREAM.index(b'"stop"')])
    assert not state.ended
    error = state.cut()
    assert (error.tokens, error.request_id) == (3, "id-1")
    assert error.message == "the stream ended without its last event, after 3 tokens"
    with pytest.raises(StreamError, match="early, after 3 tokens"):
        state.result()
    with pytest.raises(LogitdError, match=r"after 3 tokens"):
        _ = state.tail


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    inner = [places(value[key]) for key in keys if isinstance(value[key], (dict, list))]
    return found + [place for some in inner for place in some]


@given(st.integers(0, 5), st.integers(0, 10**6), JSON, st.booleans())
def test_any_member_of_an_event_is_read_or_refused(
    which: int, place: int, value: Any, drop: bool
) -> None:
    events = json.loads(json.dumps([*CHUNKS, chunk(**TAIL)]))
    all_places = places(events[which])
    container, key = all_places[place % len(all_places)]
    if drop:
        del container[key]
    else:
        container[key] = value
    stream = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    with suppress(LogitdError):
        state, _ = read_all(stream + sse.DONE)
        state.result()


@given(st.binary())
def test_any_bytes_are_read_or_refused(stream: bytes) -> None:
    for one in (stream, b"data: " + stream + b"\n\n"):
        with suppress(LogitdError):
            read_all(one)
