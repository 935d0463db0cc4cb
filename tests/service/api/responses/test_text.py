"""Replies: from events to JSON, without a server."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.checkpoint.checkpoint import CheckpointInfo, read_checkpoint
from logitd.model.inference.engine.events import (
    FinishEvent,
    FinishReason,
    SequenceTimes,
    TokenEvent,
)
from logitd.model.inference.sampling.params import TokenLogprob
from logitd.service.api.responses.text import (
    CHECKPOINT_HEADERS,
    Completion,
    checkpoint_headers,
    envelope,
    server_timing,
    timings,
    token_json,
    usage,
)
from logitd.service.core.ids import new_id
from tests.model.factories import byte_tokenizer, training_record
from tests.service.spelling import END_OF_TEXT_ID

TOKENIZER = byte_tokenizer()


@pytest.fixture
def checkpoint(checkpoint_path: Path) -> CheckpointInfo:
    return read_checkpoint(checkpoint_path)


def completion(*stop: str, echo: bytes = b"") -> Completion:
    return Completion(
        TOKENIZER,
        index=3,
        prompt_index=1,
        stop=stop,
        stop_token_ids=frozenset({END_OF_TEXT_ID}),
        echo=list(echo),
    )


def token(token_id: int) -> TokenEvent:
    return TokenEvent("gen-1", 0, token_id)


def finish(
    reason: FinishReason = FinishReason.LENGTH,
    *,
    index: int = 0,
    times: SequenceTimes | None = None,
    prompt_tokens: int = 2,
    cached_tokens: int = 0,
    stop_token_id: int | None = None,
) -> FinishEvent:
    return FinishEvent(
        request_id="gen-1",
        index=index,
        reason=reason,
        times=times or SequenceTimes(0, 0, 0, 0),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=1,
        stop_token_id=stop_token_id,
    )


# Completion


@given(st.text(max_size=12), st.lists(st.integers(0, 40)))
def test_deltas_joined_are_the_whole_and_no_character_is_cut(text: str, looks: list[int]) -> None:
    whole, parts = completion(), completion()
    seen_text, seen_ids = "", []
    for place, byte in enumerate(text.encode()):
        whole.push(token(byte))
        parts.push(token(byte))
        if place in looks and (delta := parts.take()) is not None:
            seen_text += delta["text"]
            seen_ids += delta["token_ids"]
            assert text.startswith(seen_text), "half a character was shown"
            assert delta["finish_reason"] is None
    whole.finish(finish())
    parts.finish(finish())
    everything, rest = whole.take(), parts.take()
    assert everything is not None
    assert rest is not None
    assert everything["text"] == text == seen_text + rest["text"]
    assert everything["token_ids"] == list(text.encode()) == seen_ids + rest["token_ids"]
    assert everything["finish_reason"] == rest["finish_reason"] == "length"
    assert parts.take() is None


def test_a_character_left_open_at_the_end_becomes_a_replacement() -> None:
    one = completion()
    for byte in "é".encode()[:1]:
        one.push(token(byte))
    assert one.take() == {
        "index": 3,
        "prompt_index": 1,
        "text": "",
        "token_ids": [0xC3],
        "finish_reason": None,
        "stop_reason": None,
    }
    one.finish(finish())
    last = one.take()
    assert last is not None
    assert (last["text"], last["token_ids"]) == ("\ufffd", [])


def test_a_stop_text_ends_the_text_before_it_and_what_follows_is_not_counted() -> None:
    one = completion("cd")
    ended = [one.push(token(byte)) for byte in b"abcdef"]
    assert ended == [False, False, False, True, False, False]
    one.finish(finish(FinishReason.ABORT))  # as the service does with the sequence
    whole = one.take()
    assert whole is not None
    assert (whole["text"], whole["token_ids"]) == ("ab", list(b"abcd"))
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "cd")
    assert one.generated == 4


def test_a_stop_text_can_be_completed_by_the_end_of_the_bytes() -> None:
    one = completion("\ufffd")
    one.push(token(ord("a")))
    assert not one.push(token(0xC3))
    one.finish(finish())
    whole = one.take()
    assert whole is not None
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == ("a", "stop", "\ufffd")


def test_a_stop_token_is_among_the_ids_and_not_in_the_text() -> None:
    one = completion("a<")  # the token's name could complete it, but is not text
    one.push(token(ord("a")))
    one.push(token(END_OF_TEXT_ID))
    one.finish(finish(FinishReason.STOP, stop_token_id=END_OF_TEXT_ID))
    whole = one.take()
    assert whole is not None
    assert whole["text"] == "a"
    assert whole["token_ids"] == [ord("a"), END_OF_TEXT_ID]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", END_OF_TEXT_ID)


def test_echo_comes_first_and_is_not_searched_for_stop_texts() -> None:
    one = completion("hi", echo=b"say hi")
    first = one.take()
    assert first is not None
    assert first["text"] == "say hi"
    assert first["token_ids"] == list(b"say hi")
    assert not one.push(token(ord("h")))
    assert one.push(token(ord("i")))


def test_logprobs_go_with_their_tokens() -> None:
    one = completion()
    best = TokenLogprob(0x61, -0.5, 1)
    chosen = TokenLogprob(0xE9, -3.0, 9)
    one.push(TokenEvent("gen-1", 0, 0xE9, chosen, (best,)))
    whole = one.take()
    assert whole is not None
    assert whole["tokens"] == [
        {
            "id": 0xE9,
            "text": "\ufffd",
            "bytes": [0xE9],
            "logprob": -3.0,
            "rank": 9,
            "top": [{"id": 0x61, "text": "a", "bytes": [0x61], "logprob": -0.5, "rank": 1}],
        }
    ]


def test_a_token_is_id_text_and_bytes() -> None:
    assert token_json(TOKENIZER, 97) == {"id": 97, "text": "a", "bytes": [97]}
    special = token_json(TOKENIZER, END_OF_TEXT_ID)
    assert bytes(special["bytes"]).decode() == special["text"] == "<|endoftext|>"


# Counts and times


def test_usage_counts_a_prompt_once_whatever_its_n() -> None:
    finishes = [
        finish(index=1, prompt_tokens=10, cached_tokens=9),
        finish(index=0, prompt_tokens=10, cached_tokens=3),
        finish(index=0, prompt_tokens=5, cached_tokens=0),
    ]
    assert usage(finishes, 7) == {
        "prompt_tokens": 15,
        "completion_tokens": 7,
        "total_tokens": 22,
        "cached_tokens": 3,
    }


def test_timings_span_all_sequences() -> None:
    first = finish(times=SequenceTimes(10.0, 10.5, 11.0, 13.0))
    second = finish(times=SequenceTimes(10.0, 11.5, 12.0, 15.0))
    assert timings([second, first], 8) == {
        "queue_ms": 500.0,
        "prefill_ms": 500.0,
        "decode_ms": 4000.0,
        "ttft_ms": 1000.0,
        "tokens_per_second": 2.0,
    }


def test_timings_of_what_never_started_divide_by_nothing() -> None:
    never = finish(FinishReason.ABORT, times=SequenceTimes(10.0, None, None, 12.0))
    assert timings([never], 0)["tokens_per_second"] == 0.0


def test_the_phases_are_a_header_too() -> None:
    first = finish(times=SequenceTimes(10.0, 10.5, 11.0, 13.0))
    second = finish(times=SequenceTimes(10.0, 11.5, 12.0, 15.00025))
    assert server_timing([second, first]) == {
        "Server-Timing": "queue;dur=500.000, prefill;dur=500.000, decode;dur=4000.250"
    }


# Who answers


def test_ids_do_not_repeat() -> None:
    ids = {new_id("gen") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(one.startswith("gen-") and len(one) > 30 for one in ids)


def test_the_envelope_names_the_weights(checkpoint: CheckpointInfo) -> None:
    head = envelope("gen-1", checkpoint)
    assert head["model"] == head["checkpoint"]["name"] == "tiny"
    assert head["checkpoint"]["weights_sha256"] == checkpoint.weights_sha256
    assert (head["checkpoint"]["step"], head["checkpoint"]["val_loss"]) == (7, 2.5)


def test_headers_say_the_same(checkpoint: CheckpointInfo) -> None:
    assert checkpoint_headers(checkpoint) == {
        "X-Logitd-Name": "tiny",
        "X-Logitd-Step": "7",
        "X-Logitd-Val-Loss": "2.5",
        "X-Logitd-Weights-Sha256": checkpoint.weights_sha256,
    }
    assert tuple(checkpoint_headers(checkpoint)) == CHECKPOINT_HEADERS


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("modèle", "mod%C3%A8le"),
        ("模型", "%E6%A8%A1%E5%9E%8B"),
        ("two words", "two%20words"),
        ("a\r\nX-Evil: 1", "a%0D%0AX-Evil:%201"),
        ("100%", "100%25"),
        ("step-000500[best]", "step-000500[best]"),
    ],
)
def test_a_name_that_no_header_can_hold_is_percent_encoded(
    checkpoint: CheckpointInfo, name: str, sent: str
) -> None:
    assert checkpoint_headers(replace(checkpoint, name=name))["X-Logitd-Name"] == sent


def test_what_is_unknown_has_no_header(checkpoint: CheckpointInfo) -> None:
    never = replace(checkpoint, training=training_record(val_loss=None))
    assert "X-Logitd-Val-Loss" not in checkpoint_headers(never)
