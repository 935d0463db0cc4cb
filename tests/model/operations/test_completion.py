"""Completions: the engine's events are turned into growing text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.engine.events import (
    FinishEvent,
    FinishReason,
    PromptEvent,
    SequenceTimes,
    TokenEvent,
)
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.sampling.params import SamplingParams, TokenLogprob
from logitd.model.inference.sampling.results import ScoredToken
from logitd.model.operations.completion import Completion, GrowingReply, Piece
from logitd.model.operations.operation import Completions
from logitd.model.operations.tokens import token_json
from tests.model.factories import byte_tokenizer
from tests.service.spelling import END_OF_TEXT_ID

TOKENIZER = byte_tokenizer()


def completion(*stop: str, echo: bytes = b"", min_tokens: int = 0) -> Completion:
    params = SamplingParams(
        max_tokens=99, seed=5, stop_token_ids=frozenset({END_OF_TEXT_ID}), min_tokens=min_tokens
    )
    return Completion(TOKENIZER, index=3, prompt_index=1, stop=stop, params=params, echo=list(echo))


def taken(one: Completion) -> Piece:
    piece = one.take()
    assert piece is not None
    return piece


def token(token_id: int) -> TokenEvent:
    return TokenEvent("gen-1", 0, token_id)


def finish(
    reason: FinishReason = FinishReason.LENGTH,
    *,
    request_id: str = "gen-1",
    index: int = 0,
    prompt_tokens: int = 2,
    cached_tokens: int = 0,
    stop_token_id: int | None = None,
) -> FinishEvent:
    times = SequenceTimes(0, 0, 0, 0)
    return FinishEvent(request_id, index, reason, times, prompt_tokens, cached_tokens, 1,
                       stop_token_id=stop_token_id)  # fmt: skip


# Completion


@given(st.text(max_size=12), st.lists(st.integers(0, 40)))
def test_deltas_joined_are_the_whole_and_no_character_is_cut(text: str, looks: list[int]) -> None:
    whole, parts = completion(), completion()
    seen_text, seen_ids = "", []
    for place, byte in enumerate(text.encode()):
        whole.push(token(byte))
        parts.push(token(byte))
        if place in looks and (delta := parts.take()) is not None:
            seen_text += delta.text
            seen_ids += delta.token_ids
            assert text.startswith(seen_text), "half a character was shown"
            assert delta.finish_reason is None
    whole.finish(finish())
    parts.finish(finish())
    everything, rest = whole.take(), parts.take()
    assert everything is not None
    assert rest is not None
    assert everything.text == text == seen_text + rest.text
    assert everything.token_ids == list(text.encode()) == seen_ids + rest.token_ids
    assert everything.finish_reason == rest.finish_reason == "length"
    assert parts.take() is None


@pytest.mark.parametrize(
    ("reason", "text"), [(FinishReason.LENGTH, ""), (FinishReason.STOP, "\ufffd")]
)
def test_incomplete_character_at_max_tokens_is_held_back(reason: FinishReason, text: str) -> None:
    one = completion()
    one.push(token("é".encode()[0]))
    first = taken(one)
    assert first.to_json(TOKENIZER) == {
        "index": 3,
        "prompt_index": 1,
        "text": "",
        "token_ids": [0xC3],
        "seed": 5,
        "finish_reason": None,
        "stop_reason": None,
    }
    one.finish(finish(reason))
    last = taken(one)
    assert (last.text, last.token_ids) == (text, [])


def test_stop_string_ends_text_and_counting() -> None:
    one = completion("cd")
    ended = [one.push(token(byte)) for byte in b"abcdef"]
    assert ended == [False, False, False, True, False, False]
    one.finish(finish(FinishReason.ABORT))  # as the service ends the sequence
    whole = taken(one)
    assert (whole.text, whole.token_ids) == ("ab", list(b"abcd"))
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "cd")
    assert one.generated == 4


def test_stop_string_can_be_completed_by_the_end_of_the_bytes() -> None:
    one = completion("\ufffd")
    one.push(token(ord("a")))
    assert not one.push(token(0xC3))
    one.finish(finish(FinishReason.STOP))
    whole = taken(one)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("a", "stop", "\ufffd")


@pytest.mark.parametrize(
    ("min_tokens", "stop", "text", "stop_reason"),
    [
        (1, ["ab"], "", "ab"),  # the token that completes it counts
        (2, ["ab"], "abc", "ab"),
        (2, ["aba", "ba"], "", "aba"),
        (3, ["abx", "ab"], "abc", "ab"),
        (
            4,
            ["abcx", "bc"],
            "abcab",
            None,
        ),  # a longer string keeps back text although it did not match
        (6, ["c", "\ufffd"], "abcab", None),
    ],
)
def test_stop_string_counts_only_after_min_tokens(
    min_tokens: int, stop: list[str], text: str, stop_reason: str | None
) -> None:
    one = completion(*stop, min_tokens=min_tokens)
    data = {"aba": b"abac"}.get(stop[0], b"abcab")
    for byte in data:
        if one.push(token(byte)):
            break
    else:
        one.push(token(0xC3))
        one.finish(finish())
    whole = taken(one)
    assert (whole.text, whole.stop_reason) == (text, stop_reason)


def test_stop_token_is_in_the_ids_but_not_in_the_text() -> None:
    one = completion("a<")  # the token's name could complete it, but is not text
    one.push(token(ord("a")))
    one.push(token(END_OF_TEXT_ID))
    one.finish(finish(FinishReason.STOP, stop_token_id=END_OF_TEXT_ID))
    whole = taken(one)
    assert whole.text == "a"
    assert whole.token_ids == [ord("a"), END_OF_TEXT_ID]
    assert (whole.finish_reason, whole.stop_reason) == ("stop", END_OF_TEXT_ID)


def test_echo_is_not_searched_for_stop_strings() -> None:
    one = completion("hi", echo=b"say hi")
    first = taken(one)
    assert first.text == "say hi"
    assert first.token_ids == list(b"say hi")
    assert not one.push(token(ord("h")))
    assert one.push(token(ord("i")))


def test_logprobs_go_with_their_tokens() -> None:
    one = completion()
    best = TokenLogprob(0x61, -0.5, 1)
    chosen = TokenLogprob(0xE9, -3.0, 9)
    one.push(TokenEvent("gen-1", 0, 0xE9, chosen, (best,)))
    whole = taken(one)
    assert whole.to_json(TOKENIZER)["tokens"] == [
        {
            "id": 0xE9,
            "text": "\ufffd",
            "bytes": [0xE9],
            "logprob": -3.0,
            "rank": 9,
            "top": [{"id": 0x61, "text": "a", "bytes": [0x61], "logprob": -0.5, "rank": 1}],
        }
    ]


def test_token_has_id_text_and_bytes() -> None:
    assert token_json(TOKENIZER, 97) == {"id": 97, "text": "a", "bytes": [97]}
    special = token_json(TOKENIZER, END_OF_TEXT_ID)
    assert bytes(special["bytes"]).decode() == special["text"] == "<|endoftext|>"


# A whole reply


def growing_reply(*prompts: bytes, n: int, **fields: Any) -> GrowingReply:
    params = SamplingParams(max_tokens=5, seed=3)
    requests = [
        GenerationRequest(request_id=f"gen-{i}", token_ids=tuple(prompt), params=params, n=n)
        for i, prompt in enumerate(prompts)
    ]
    asked = {"stop": (), "echo": False, "logprobs": None, "prompt_logprobs": None, **fields}
    return GrowingReply(Completions(requests, n, **asked), TOKENIZER)


def test_usage_counts_a_prompt_once_for_any_n() -> None:
    reply = growing_reply(b"0123456789", b"abcde", n=2)
    for i, index, prompt_tokens, cached in (
        (0, 1, 10, 9),
        (0, 0, 10, 3),
        (1, 0, 5, 0),
        (1, 1, 5, 5),
    ):
        reply.push(TokenEvent(f"gen-{i}", index, 97))
        finished = finish(request_id=f"gen-{i}", index=index, prompt_tokens=prompt_tokens,
                          cached_tokens=cached)  # fmt: skip
        assert not reply.is_finished(finished)
        reply.push(finished)
        assert reply.is_finished(finished)
    assert reply.usage() == {
        "prompt_tokens": 15,
        "completion_tokens": 4,
        "total_tokens": 19,
        "cached_tokens": 3,
    }
    assert reply.seed == 3


def test_choices_are_numbered_by_prompt() -> None:
    reply = growing_reply(b"x", b"y", n=2, stop=("b",))
    assert reply.take_json() == {"choices": []}
    assert not reply.push(TokenEvent("gen-1", 0, 97))
    assert reply.push(TokenEvent("gen-1", 1, 98)), "its sequence need not continue"
    one, other = reply.take_json()["choices"]
    assert (one["index"], one["prompt_index"], one["text"]) == (2, 1, "a")
    assert (other["index"], other["finish_reason"], other["stop_reason"]) == (3, "stop", "b")
    assert reply.take() == []


def test_prompt_logprobs_serve_echoes_and_a_separate_list() -> None:
    reply = growing_reply(b"ab", n=2, echo=True, logprobs=1, prompt_logprobs=2)
    likely = tuple(TokenLogprob(i, -float(i), i) for i in (1, 2))
    reply.push(PromptEvent("gen-0", 0, 0, (ScoredToken(97), ScoredToken(98, likely[1], likely))))
    new = reply.take_json()
    assert [[len(token["top"]) for token in choice["tokens"]] for choice in new["choices"]] == [
        [0, 1], [0, 1],
    ]  # fmt: skip
    (prompt,) = new["prompts"]
    assert [len(token["top"]) for token in prompt["tokens"]] == [0, 2]
    assert "prompts" not in reply.take_json()
