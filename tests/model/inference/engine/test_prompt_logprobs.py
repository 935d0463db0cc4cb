"""Logprobs of a prompt's own tokens when a prefix cache is used. The values themselves are tested
in `test_numbers.py`, as scores."""

import random

import pytest
import torch

from logitd.model.inference.engine.cost import LISTED_ELEMENTS
from logitd.model.inference.engine.events import FinishReason, PromptEvent, TokenEvent
from tests.model.inference.engine.harness import Driven, generation, random_prompt, small_gpt

GPT = small_gpt()
PROMPT = random_prompt(random.Random(0), 100)


@pytest.mark.parametrize(
    ("prefill_chunk", "step_elements"),
    [(32, None), (64, None), (96, None), (128, None), (128, 70 * LISTED_ELEMENTS)],
)
def test_prompt_logprobs_precede_tokens(prefill_chunk: int, step_elements: int | None) -> None:
    """The sequence that scores the prompt computes all of it, while its sibling sequences could
    copy all of it. If they got ahead of it, an echoed prompt would come after the completion's
    first tokens. With 70 scored positions per step, the rest of the siblings' prompt would fit into
    the first step, but not all of the scores."""
    driven = Driven(GPT, prefill_chunk=prefill_chunk)
    scheduler = driven.engine._scheduler
    scheduler.step_elements = step_elements or scheduler.step_elements
    driven.add(generation("before", PROMPT))
    driven.drain()
    driven.add(generation("p", PROMPT, n=3, prompt_logprobs=1))
    first_token_seen = False
    while driven.engine.has_work():
        for event in driven.step().events:
            first_token_seen |= isinstance(event, TokenEvent)
            assert not (first_token_seen and isinstance(event, PromptEvent))
    assert len(driven.outcomes["p", 0].prompt) == len(PROMPT)


@pytest.mark.parametrize("at", [3, 19])
def test_prompt_logprobs_that_are_not_finite_end_their_sequences_once(at: int) -> None:
    """The step that scores the end of the prompt has also sampled the first token."""
    broken = small_gpt(tied_head=False)
    prompt = [token % 7 for token in PROMPT[:20]]
    broken.token_embedding.weight.data[7] = torch.nan
    driven = Driven(broken)
    driven.add(generation("p", [*prompt[:at], 7, *prompt[at + 1 :]], n=2, prompt_logprobs=1))
    driven.add(generation("other", prompt, prompt_logprobs=1))
    outcomes = driven.drain()
    for index in range(2):
        assert "not finite" in (outcomes["p", index].ended.error or "")
        assert outcomes["p", index].ended.completion_tokens == 0
    assert outcomes["other", 0].ended.reason is FinishReason.LENGTH
