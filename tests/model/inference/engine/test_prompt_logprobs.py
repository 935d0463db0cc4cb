"""Logprobs of a prompt's own tokens: those of the plain forward, however the prompt is computed."""

import random

import pytest
import torch

from logitd.model.inference.engine.events import PromptEvent, TokenEvent
from logitd.model.inference.errors import InvalidRequest
from tests.model.inference.engine.harness import Driven, generation, random_prompt, run, small_gpt

GPT = small_gpt()
PROMPT = random_prompt(random.Random(0), 100)


def plain_logprobs(prompt: list[int]) -> torch.Tensor:
    """(T, V) in float64, from the plain forward."""
    return GPT(torch.tensor([prompt])).logits[0].double().log_softmax(dim=-1)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("prefill_chunk", [32, 96])
def test_they_are_those_of_the_plain_forward(length: int, prefill_chunk: int) -> None:
    prompt = PROMPT[:length]
    outcome = run(GPT, generation("p", prompt, prompt_logprobs=3), prefill_chunk=prefill_chunk)
    scored, plain = outcome["p", 0].prompt, plain_logprobs(prompt)
    assert [token.token_id for token in scored] == prompt
    assert scored[0].chosen is None
    assert scored[0].top == ()
    for position, token in enumerate(scored[1:]):  # the row of a position scores the next token
        assert token.chosen is not None
        assert token.chosen.token_id == token.token_id
        expected = plain[position, token.token_id].item()
        assert token.chosen.logprob == pytest.approx(expected, abs=1e-4)
        assert [t.token_id for t in token.top] == plain[position].topk(3).indices.tolist()
        assert [t.rank for t in token.top] == [1, 2, 3]


def test_a_warm_cache_changes_no_bit_of_them() -> None:
    """Elsewhere such values depended on what had been cached by whom."""
    alone = run(GPT, generation("p", PROMPT, prompt_logprobs=2))["p", 0].prompt
    driven = Driven(GPT)
    driven.add(generation("before", PROMPT))
    driven.drain()
    driven.add(generation("p", PROMPT, prompt_logprobs=2))
    outcome = driven.drain()["p", 0]
    assert outcome.ended.cached_tokens == 0, "the whole prompt is computed for them"
    assert outcome.prompt == alone


def test_n_sequences_are_told_once_and_share_the_prompt() -> None:
    outcomes = run(GPT, generation("p", PROMPT, n=3, prompt_logprobs=0))
    assert len(outcomes["p", 0].prompt) == len(PROMPT)
    assert not outcomes["p", 1].prompt
    assert [outcomes["p", i].ended.cached_tokens for i in range(3)] == [0, 96, 96]


@pytest.mark.parametrize("count", [-1, GPT.config.vocab_size + 1])
def test_an_impossible_number_is_refused(count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt_logprobs is {count}; the vocabulary has"):
        run(GPT, generation("p", PROMPT, prompt_logprobs=count))


def test_a_prompt_may_be_kept_from_sharing() -> None:
    driven = Driven(GPT)
    for name, prefix_reuse in (("first", True), ("own", False), ("shared", True)):
        driven.add(generation(name, PROMPT, prefix_reuse=prefix_reuse))
        driven.drain()
    cached = {name: outcome.ended.cached_tokens for (name, _), outcome in driven.outcomes.items()}
    assert cached == {"first": 0, "own": 0, "shared": 96}


def test_priority_goes_before_arrival() -> None:
    driven = Driven(GPT, slots=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        driven.add(generation(name, [1, 2], max_tokens=2, priority=priority))
    order = list(dict.fromkeys(name for name, _ in driven.drain()))
    assert order == ["c", "e", "a", "d", "b"]


@pytest.mark.parametrize("prefill_chunk", [32, 64, 96, 128])
def test_no_token_comes_before_the_scores(prefill_chunk: int) -> None:
    """The sequence that scores computes the whole prompt while its siblings could copy all of it;
    an echo would begin with the completion if they got ahead of it."""
    driven = Driven(GPT, prefill_chunk=prefill_chunk)
    driven.add(generation("before", PROMPT))
    driven.drain()
    driven.add(generation("p", PROMPT, n=3, prompt_logprobs=1))
    first_token_seen = False
    while driven.engine.has_work():
        for event in driven.step().events:
            first_token_seen |= isinstance(event, TokenEvent)
            assert not (first_token_seen and isinstance(event, PromptEvent))
    assert len(driven.outcomes["p", 0].prompt) == len(PROMPT)
