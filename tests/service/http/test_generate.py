"""POST /generate: the tokens and logprobs of the reference, in one reply or in exact bytes of a
stream."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from logitd.model.inference import reference
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.operations.generate import Choice, GenerateReply, Timings, Usage
from logitd.model.transformer.gpt import GPT
from logitd.service.http.schemas import ErrorReply
from tests.service.serving import Serving, events, read_until, request_bytes
from tests.service.spelling import (
    ALPHABET,
    END_OF_TEXT_ID,
    RING,
    spelled,
)

PROMPT = "A prompt"


def expected(
    gpt: GPT, prompt: str | Sequence[int] = PROMPT, *, index: int = 0, **params: Any
) -> list[int]:
    """What the reference generates; END_OF_TEXT ends it as it does in the service."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    values: dict[str, Any] = {"max_tokens": 24, "seed": 5, "stop_token_ids": {END_OF_TEXT_ID}}
    values |= params
    values["stop_token_ids"] = frozenset(values["stop_token_ids"])
    return reference.generate(gpt, ids, SamplingParams(**values), index)


def stream(server: Serving, prompt: Any, **fields: Any) -> list[Any]:
    """The events of a whole stream."""
    response = server.post("/generate", {"prompt": prompt, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return events(response.content)


def joined(chunks: Sequence[Any], index: int = 0) -> dict[str, Any]:
    """A choice put together from the deltas of a stream."""
    deltas = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    whole = dict(deltas[-1])
    whole["text"] = "".join(delta["text"] for delta in deltas)
    whole["token_ids"] = [i for delta in deltas for i in delta["token_ids"]]
    if any("tokens" in delta for delta in deltas):
        whole["tokens"] = [t for delta in deltas for t in delta.get("tokens", [])]
    assert all(delta["finish_reason"] is None for delta in deltas[:-1])
    assert whole["finish_reason"] is not None
    return whole


# One reply


def test_counts_and_times_of_a_reply(server: Serving) -> None:
    reply = GenerateReply.model_validate(server.generate([PROMPT, [1, 2]], n=2, max_tokens=6))
    assert re.fullmatch(r"gen-[0-9a-f]{32}", reply.id)
    assert reply.usage.prompt_tokens == len(PROMPT) + 2
    assert reply.usage.completion_tokens == sum(len(c.token_ids) for c in reply.choices)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    timings = reply.timings
    assert timings.ttft_ms == pytest.approx(timings.queue_ms + timings.prefill_ms)
    assert all(value >= 0 for value in timings.model_dump().values())
    assert timings.tokens_per_second > 0


def test_the_phases_are_a_header_too(server: Serving) -> None:
    response = server.post("/generate", {"prompt": PROMPT, "max_tokens": 3, "n": 2})
    timings = response.json()["timings"]
    assert response.headers["server-timing"] == ", ".join(
        f"{phase};dur={timings[f'{phase}_ms']:.3f}" for phase in ("queue", "prefill", "decode")
    )
    streamed = server.post("/generate", {"prompt": PROMPT, "max_tokens": 3, "stream": True})
    assert "server-timing" not in streamed.headers, "they are not known yet"


@pytest.mark.parametrize("fields", [{}, {"seed": -1}], ids=str)
def test_a_drawn_seed_is_returned_and_good_for_the_same_again(
    server: Serving, fields: dict[str, Any]
) -> None:
    first, second = (server.generate(PROMPT, max_tokens=24, **fields) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = server.generate(PROMPT, max_tokens=24, seed=first["seed"])
    assert again["choices"] == first["choices"]
    assert again["choices"] != second["choices"]


def test_without_a_seed_each_prompt_draws_its_own(server: Serving) -> None:
    reply = server.generate(["import"] * 3, n=2, max_tokens=24)
    choices = reply["choices"]
    assert reply["seed"] is None
    assert len({choice["text"] for choice in choices}) == 6
    for choice in choices:
        again = server.generate("import", n=2, max_tokens=24, seed=choice["seed"])["choices"]
        assert again[choice["index"] % 2]["token_ids"] == choice["token_ids"]


def test_a_seed_gives_each_prompt_what_it_gives_alone(server: Serving) -> None:
    prompts = [PROMPT, "import", PROMPT]
    reply = server.generate(prompts, n=2, max_tokens=24, seed=5)
    assert reply["seed"] == 5
    alone = [server.generate(prompt, n=2, max_tokens=24, seed=5)["choices"] for prompt in prompts]
    own = ("text", "token_ids", "seed")
    assert [[choice[name] for name in own] for choice in reply["choices"]] == [
        [choice[name] for name in own] for choices in alone for choice in choices
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_that_fills_the_context_is_computed_alone(server: Serving, streamed: bool) -> None:
    fields = {"max_tokens": 0, "prompt_logprobs": 1, "echo": True, "n": 2}
    prompt = "x" * 128
    (scored,) = server.post("/score", {"prompt": prompt, "logprobs": 1}).json()["prompts"]
    if streamed:
        chunks = stream(server, prompt, **fields)
        choices = [joined(chunks, index) for index in range(2)]
        tokens = [
            token for chunk in chunks for p in chunk.get("prompts", []) for token in p["tokens"]
        ]
        usage = chunks[-1]["usage"]
    else:
        reply = server.generate(prompt, **fields)
        choices, usage, tokens = reply["choices"], reply["usage"], reply["prompts"][0]["tokens"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        (prompt, "length")
    ] * 2
    assert tokens == scored["score"]["tokens"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (128, 0)


def test_absent_max_tokens_is_what_fits(server: Serving, gpt: GPT) -> None:
    prompt = "x" * 100
    reply = server.generate(prompt, seed=5, ignore_eos=True)
    (choice,) = reply["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert reply["usage"]["total_tokens"] == 128
    assert choice["token_ids"] == expected(gpt, prompt, max_tokens=28, stop_token_ids=())
    full = server.generate("x" * 127, seed=5)
    assert full["usage"]["completion_tokens"] == 1


# Where a completion ends


def test_end_of_text_ends_it_and_is_no_text(speller: Serving) -> None:
    (choice,) = speller.generate("xyz")["choices"]
    assert choice["text"] == " é€😀."
    assert choice["token_ids"] == spelled("z", 12)
    assert choice["token_ids"][-1] == END_OF_TEXT_ID
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", END_OF_TEXT_ID)


def test_ignore_eos_goes_on(speller: Serving) -> None:
    (choice,) = speller.generate("xyz", max_tokens=15, ignore_eos=True)["choices"]
    assert choice["text"] == " é€😀.<|endoftext|>abc"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stop_token_ids", [[ord("e")], [ord("m"), ord("e"), ord("z")]])
def test_stop_token_ids(speller: Serving, stop_token_ids: list[int]) -> None:
    (choice,) = speller.generate("a", stop_token_ids=stop_token_ids)["choices"]
    assert choice["text"] == "bcd"
    assert choice["token_ids"] == list(b"bcde")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("e"))


@pytest.mark.parametrize(
    ("stop", "text", "found", "tokens"),
    [
        ("e", "bcd", "e", 4),
        ("def", "bc", "def", 5),
        (["xyz", "gh", "hi"], "bcdef", "gh", 7),
        (["hi", "gh"], "bcdef", "gh", 7),
        ("b", "", "b", 1),
        ("é", "bcdefghijklmnopqrstuvwxyz ", "é", 28),
        ("z é€😀.", "bcdefghijklmnopqrstuvwxy", "z é€😀.", 36),
        ("€", "bcdefghijklmnopqrstuvwxyz é", "€", 31),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings(
    speller: Serving, stop: Any, text: str, found: str, tokens: int, streamed: bool
) -> None:
    before = speller.finished("stop"), speller.finished("abort"), speller.finished("length")
    if streamed:
        chunks = stream(speller, "a", stop=stop, ignore_eos=True)
        choice, usage = joined(chunks), chunks[-1]["usage"]
        shown = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
        assert shown == text, "nothing of the stop string is ever shown"
    else:
        reply = speller.generate("a", stop=stop, ignore_eos=True)
        (choice,), usage = reply["choices"], reply["usage"]
    assert choice["text"] == text
    assert choice["token_ids"] == spelled("a", tokens), "up to the one that completes it"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", found)
    assert usage["completion_tokens"] == tokens
    speller.wait_idle()
    after = speller.finished("stop"), speller.finished("abort"), speller.finished("length")
    assert after == (before[0] + 1, *before[1:]), "it ended as told, and does not run on"


@pytest.mark.parametrize("streamed", [False, True])
def test_what_only_began_a_stop_string_is_given_at_the_end(
    speller: Serving, streamed: bool
) -> None:
    fields: dict[str, Any] = {"stop": ["fgX", "yz é€😀.!"]}
    if streamed:
        choice = joined(stream(speller, "w", **fields))
    else:
        (choice,) = speller.generate("w", **fields)["choices"]
    assert choice["text"] == "xyz é€😀."
    assert choice["stop_reason"] == END_OF_TEXT_ID


def test_text_that_may_begin_a_stop_string_is_held_back(speller: Serving) -> None:
    """Its tokens are told at once, its text when it is clear."""
    chunks = stream(speller, "a", stop="defgX", max_tokens=9)
    seen_ids: list[int] = []
    seen_text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            seen_ids += choice["token_ids"]
            seen_text += choice["text"]
            if choice["finish_reason"] is None and seen_ids[-1] in b"defg":
                assert seen_text == "bc"
    assert seen_text == "bcdefghij"


def test_each_of_several_sequences_stops_by_itself(speller: Serving) -> None:
    choices = speller.generate(["a", "p", "w"], stop=["d", "rs"], max_tokens=8)["choices"]
    assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in choices] == [
        ("bc", "stop", "d"),
        ("q", "stop", "rs"),
        ("xyz é", "length", None),
    ]


# Echo, logprobs, model, timeout


def test_echo_puts_the_prompt_in_front_of_every_text(speller: Serving) -> None:
    fields: dict[str, Any] = {"echo": True, "max_tokens": 3, "n": 2, "stop": "ab"}
    whole = speller.generate(["tab", list(b"x")], **fields)["choices"]
    assert [choice["text"] for choice in whole] == ["tabcde", "tabcde", "xyz ", "xyz "]
    assert whole[0]["token_ids"] == list(b"tabcde"), "ids and text stay side by side"
    chunks = stream(speller, ["tab", list(b"x")], **fields)
    assert [joined(chunks, index)["text"] for index in range(4)] == [c["text"] for c in whole]


def prompt_logprobs(gpt: GPT, prompt: str) -> list[float | None]:
    """Of each byte of a prompt under the plain forward; nothing predicts the first."""
    ids = list(prompt.encode())
    rows = gpt(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    return [None, *(rows[i, ids[i + 1]].item() for i in range(len(ids) - 1))]


def test_prompt_logprobs_are_those_of_the_model(server: Serving, gpt: GPT) -> None:
    prompts = [PROMPT, "x", PROMPT * 3]
    fields: dict[str, Any] = {"max_tokens": 2, "seed": 1, "n": 2, "prompt_logprobs": 2}
    reply = GenerateReply.model_validate(server.generate(prompts, **fields))
    assert reply.prompts is not None
    assert [scored.index for scored in reply.prompts] == [0, 1, 2]
    for scored, prompt in zip(reply.prompts, prompts, strict=True):
        assert [token.id for token in scored.tokens] == list(prompt.encode())
        expected = prompt_logprobs(gpt, prompt)
        assert [token.logprob for token in scored.tokens] == pytest.approx(expected, abs=1e-4)
        assert [len(token.top) for token in scored.tokens] == [0] + [2] * (len(prompt) - 1)
    streamed: dict[int, list[int]] = {}
    for chunk in stream(server, prompts, **fields):
        for scored in chunk.get("prompts", []):
            streamed.setdefault(scored["index"], []).extend(t["id"] for t in scored["tokens"])
    assert streamed == {i: list(prompt.encode()) for i, prompt in enumerate(prompts)}
    assert reply.choices[0].tokens is None


def test_echo_with_logprobs_covers_the_prompt_warm_or_cold(server: Serving, gpt: GPT) -> None:
    """What is cached must not show: the prompt is computed again for its logprobs."""
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 3, "n": 2, "seed": 3}
    cold = server.generate(PROMPT * 3, prefix_reuse=False, **fields)["choices"]
    warm = server.generate(PROMPT * 3, **fields)["choices"]
    assert warm == cold
    for choice in warm:
        assert [token["id"] for token in choice["tokens"]] == choice["token_ids"]
        logprobs = [token["logprob"] for token in choice["tokens"]]
        expected = prompt_logprobs(gpt, PROMPT * 3)
        assert logprobs[: len(expected)] == pytest.approx(expected, abs=1e-4)
        assert len(logprobs) == len(expected) + 3
    chunks = stream(server, PROMPT * 3, **fields)
    for index in range(2):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [t for part in parts for t in part.get("tokens", [])] == warm[index]["tokens"]


def test_a_prompt_can_be_kept_from_the_cache(server: Serving) -> None:
    prompt = "k" * 70
    for prefix_reuse, cached in ((True, 0), (True, 64), (False, 0)):
        reply = server.generate(prompt, max_tokens=1, prefix_reuse=prefix_reuse)
        assert reply["usage"]["cached_tokens"] == cached


def test_a_timeout_is_504_and_frees_the_slot(speller: Serving) -> None:
    ended = speller.finished("timeout")
    error = speller.refused("/generate", {"prompt": "a", "timeout": 0.1, "ignore_eos": True}, 504)
    assert (error.type, error.code) == ("timeout_error", "deadline_exceeded")
    speller.wait_idle()
    assert speller.finished("timeout") == ended + 1


def test_a_timeout_in_a_stream_is_its_last_event(speller: Serving) -> None:
    chunks = stream(speller, "a", timeout=0.1, ignore_eos=True)
    assert ErrorReply.model_validate(chunks[-1]).error.code == "deadline_exceeded"
    received = [i for chunk in chunks[:-1] for c in chunk["choices"] for i in c["token_ids"]]
    assert received == spelled("a", len(received))
    speller.wait_idle()


# Streams


def test_the_bytes_of_a_stream(speller: Serving) -> None:
    with speller.connect() as raw:
        body = {"prompt": "x", "max_tokens": 4, "stream": True, "seed": 3}
        raw.sendall(request_bytes("/generate", body, "X-Request-ID: abc", "Connection: close"))
        head, _, chunked = read_until(raw, b"0\r\n\r\n").partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith((b"date:", b"server:"))]
    assert lines == [
        b"HTTP/1.1 200 OK",
        b"cache-control: no-cache",
        b"x-accel-buffering: no",
        b"content-type: text/event-stream; charset=utf-8",
        b"x-request-id: abc",
        b"connection: close",
        b"transfer-encoding: chunked",
    ]
    # Each chunk on the wire is one whole event.
    wire = []
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        wire.append(rest[: int(size, 16)])
        chunked = rest[int(size, 16) + 2 :]
    assert wire.pop() == b""
    assert wire[-1] == b"data: [DONE]\n\n"
    assert all(
        re.fullmatch(rb'data: \{"id":"gen-[0-9a-f]{32}","created":[0-9]{10},"model":"spelling",'
                     rb'"checkpoint":\{[^\n]*\},"choices":\[[^\n]*\][^\n]*\}\n\n', event)
        for event in wire[:-1]
    )  # fmt: skip
    deltas = re.findall(rb'"choices":(\[.*?\])[,}]', b"".join(wire))
    assert b"".join(re.findall(rb'"text":"(.*?)"', b"".join(deltas))) == b"yz "
    assert deltas[0].startswith(b'[{"index":0,"prompt_index":0,"text":"y')
    assert deltas[-1] == b"[]"


def test_chunks_have_the_shape_of_the_reply(server: Serving) -> None:
    chunks = stream(server, [PROMPT, "more"], n=2, max_tokens=5, seed=5, logprobs=1)
    heads = [{k: chunk[k] for k in ("id", "created", "model", "checkpoint")} for chunk in chunks]
    assert all(head == heads[0] for head in heads)
    for chunk in chunks[:-1]:
        assert set(chunk) == {"id", "created", "model", "checkpoint", "choices"}
        assert chunk["choices"]
        for choice in chunk["choices"]:
            Choice.model_validate(choice)
    *_, last = chunks
    assert last["choices"] == []
    Usage.model_validate(last["usage"])
    Timings.model_validate(last["timings"])
    assert last["seed"] == 5
    # Put together they are the reply.
    choices = [joined(chunks, index) for index in range(4)]
    GenerateReply.model_validate({**heads[0], **last, "choices": choices})


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3, "logprobs": 2}, {"temperature": 0}, {"stop": ["a", "\ufffd"]},
     {"echo": True, "max_tokens": 100}, {"top_k": 2, "min_tokens": 5}],
    ids=str,
)  # fmt: skip
def test_a_stream_gives_the_same_as_one_reply(server: Serving, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 24, "seed": 5, **fields}
    whole = server.generate([PROMPT, [200, 201]], **fields)
    chunks = stream(server, [PROMPT, [200, 201]], **fields)
    assert [joined(chunks, choice["index"]) for choice in whole["choices"]] == whole["choices"]
    same = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][k] for k in same] == [whole["usage"][k] for k in same]
    assert chunks[-1]["seed"] == whole["seed"]


def test_no_chunk_ends_inside_a_character(speller: Serving) -> None:
    for _ in range(3):
        text = ""
        for chunk in stream(speller, "y", max_tokens=3 * len(RING), ignore_eos=True):
            for choice in chunk["choices"]:
                text += choice["text"]
                assert "\ufffd" not in text
        everything = f"{ALPHABET}<|endoftext|>" * 4
        start = everything.index("z")
        assert text == everything[start : start + len(text)]
        assert text.count("😀") == 3


def test_tokens_come_one_by_one_not_all_at_the_end(speller: Serving) -> None:
    with speller.client.stream(
        "POST", "/generate", json={"prompt": "a", "stream": True, "ignore_eos": True}
    ) as response:
        received = b""
        for data in response.iter_raw():
            received += data
            if received.count(b"data: ") >= 3:
                break
        assert speller.served.engine.open_sequences == 1, "it is still running"
    speller.wait_idle()
