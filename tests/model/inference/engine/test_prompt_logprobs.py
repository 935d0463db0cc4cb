"""Logprobs of a prompt's own tokens with a prefix cache. `test_numbers.py` tests their values as
scores."""

import random

import pytest

from logitd.model.inference.engine.events import PromptEvent, TokenEvent
from tests.model.inference.engine.harness import Driven, generation, random_prompt, run, small_gpt

GPT = small_gpt()
PROMPT = random_prompt(random.Random(0), 100)


def test_warm_cache_changes_no_prompt_logprob() -> None:
    """In other engines such values depend on what other requests have cached."""
    alone = run(GPT, generation("p", PROMPT, prompt_logprobs=2))["p", 0].prompt
    driven = Driven(GPT)
    driven.add(generation("before", PROMPT))
    driven.drain()
    driven.add(generation("p", PROMPT, prompt_logprobs=2))
    outcome = driven.drain()["p", 0]
    assert outcome.ended.cached_tokens == 0, "the whole prompt is computed for them"
    assert outcome.prompt == alone


def test_prompt_logprobs_of_n_sequences_come_once() -> None:
    outcomes = run(GPT, generation("p", PROMPT, n=3, prompt_logprobs=0))
    assert len(outcomes["p", 0].prompt) == len(PROMPT)
    assert not outcomes["p", 1].prompt
    assert [outcomes["p", i].ended.cached_tokens for i in range(3)] == [0, 96, 96]


def test_prefix_reuse_can_be_disabled() -> None:
    driven = Driven(GPT)
    for name, prefix_reuse in (("first", True), ("own", False), ("shared", True)):
        driven.add(generation(name, PROMPT, prefix_reuse=prefix_reuse))
        driven.drain()
    cached = {name: outcome.ended.cached_tokens for (name, _), outcome in driven.outcomes.items()}
    assert cached == {"first": 0, "own": 0, "shared": 96}


@pytest.mark.parametrize("prefill_chunk", [32, 64, 96, 128])
def test_prompt_logprobs_precede_tokens(prefill_chunk: int) -> None:
    """The sequence that scores the prompt computes all of it, while its siblings could copy all of
    it. If they got ahead of it, an echo would begin with the completion."""
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
