"""Speculation: an engine that verifies drafts gives the same bits as one without, in fewer steps.

The texts have few different ids. Runs of ids repeat all the time, but half of the time they
continue differently, so drafts are right, wrong, or partly right. With `counting_gpt` drafts are
always right, so the result of a step is known.
"""

import dataclasses
import random
from typing import Any

import pytest
import torch

from logitd.model.inference.engine.events import FinishReason, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.options import DRAFTED_ROWS
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT, Block
from tests.model.covering import values
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    Steps,
    generation,
    params,
    random_params,
    random_prompt,
)

DTYPES = [torch.float32, torch.bfloat16]
COUNT = 40
PROMPT = [*range(COUNT), 0, 1, 2]
"""Prompt after which `counting_gpt` continues with 3, 4, 5, ..."""


def family_gpt(family: str, dtype: torch.dtype = torch.float32) -> GPT:
    # Wide enough that bfloat16 products have one kernel; see `test_determinism.py`.
    shape = {**FAMILIES[family], "n_layer": 2, "d_model": 48}
    return tiny_gpt(tiny_config(**shape)).to(dtype)


def counting_gpt(**overrides: Any) -> GPT:
    """A model that continues an id with the next one, in a ring of COUNT ids. Attention adds too
    little to change that, but shows in the bits of every logprob."""
    shape = {"vocab_size": COUNT, "n_layer": 2, "d_model": 64, "tied_head": False}
    gpt = tiny_gpt(tiny_config(**(shape | overrides)))
    for block in gpt.blocks:
        assert isinstance(block, Block)
        block.attention_out.weight *= 0.05
        block.mlp_down.weight *= 0.05
    gpt.position_embedding.weight *= 0.05
    gpt.head.weight[:COUNT] = gpt.token_embedding.weight[:COUNT].roll(1, dims=0)
    return gpt


@pytest.fixture(scope="module")
def counting() -> GPT:
    return counting_gpt()


def of_few_ids(rng: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
    """A random mix of parameters over two to five ids, some of which may end the text."""
    mixed = random_params(rng, max_tokens, vocab_size)
    ids = rng.sample(range(vocab_size), rng.randint(2, 5))
    stop = frozenset(ids[: rng.choice([0, 0, 0, 1])])
    return dataclasses.replace(
        mixed,
        constraint=None,
        allowed_token_ids=tuple(ids),
        stop_token_ids=stop,
        min_tokens=rng.choice([0, max_tokens // 2]),
        logprobs=rng.choice([None, 0, 2]),
    )


def repetitive_request(rng: random.Random, name: str, gpt: GPT, max_tokens: int) -> Any:
    vocab_size, context = gpt.config.vocab_size, gpt.config.context_length
    length = rng.choice([rng.randint(1, 5), rng.randint(1, context - max_tokens)])
    sampling = of_few_ids(rng, rng.choice([1, 2, max_tokens, max_tokens]), vocab_size)
    ids = sampling.allowed_token_ids or ()
    prompt = [ids[token % len(ids)] for token in random_prompt(rng, length)]
    return generation(name, prompt, n=rng.choice([1, 1, 2]), sampling=sampling)


def both(gpt: GPT, *requests: GenerationRequest, **config: Any) -> tuple[Driven, dict[Any, Any]]:
    """The engine after answering these requests with drafts, and the answers without drafts."""
    found = []
    for speculate in ("ngram", "none"):
        driven = Driven(gpt, speculate=speculate, **config)
        driven.add(*requests)
        driven.drain()
        found.append(driven)
    with_drafts, without = found
    assert without.drafted_tokens == without.accepted_tokens == 0
    return with_drafts, {key: outcome.computed for key, outcome in without.outcomes.items()}


# The same bits


@pytest.mark.parametrize(("family", "dtype", "seed"), values(list(FAMILIES), DTYPES, range(2)))
def test_drafts_change_no_bit(family: str, dtype: torch.dtype, seed: int) -> None:
    """The requests are greedy and sampled and use every parameter. They run alone and alongside
    others."""
    gpt, rng = family_gpt(family, dtype), random.Random(f"{family} {seed}")
    requests = [repetitive_request(rng, str(i), gpt, 40) for i in range(8)]
    alone = {}
    for request in requests:
        driven = Driven(gpt, slots=1, prefix_reuse=False)
        driven.add(request)
        alone.update(driven.drain())
    driven = Driven(
        gpt,
        slots=rng.choice([1, 2, 5, 20]),
        prefill_chunk=32 * rng.randint(1, 3),
        prefix_reuse=rng.random() < 0.7,
        speculate="ngram",
    )
    for request in requests:
        driven.add(request)
        for _ in range(rng.choice([0, 0, 3])):
            driven.step()
    for key, outcome in driven.drain().items():
        assert outcome.computed == alone[key].computed, key
    assert 0 < driven.accepted_tokens < driven.drafted_tokens


def test_drafted_positions_are_never_shared(counting: GPT) -> None:
    driven = Driven(counting, slots=1, speculate="ngram")
    driven.add(generation("a", PROMPT, max_tokens=50))
    text = PROMPT + driven.drain()["a", 0].token_ids
    assert driven.accepted_tokens > 30
    again = generation("again", text, max_tokens=20, logprobs=3)
    driven.add(again)
    outcome = driven.drain()["again", 0]
    assert outcome.ended.cached_tokens == 32, "of the prompt's blocks"
    _, expected = both(counting, again, prefix_reuse=False)
    assert outcome.computed == expected["again", 0]


# Results of a step


def steps_of(driven: Driven) -> list[list[int]]:
    """The tokens of each step."""
    given = []
    while driven.engine.has_work():
        events = driven.step().events
        given.append([event.token_id for event in events if isinstance(event, TokenEvent)])
    return given


def test_repetitive_text_takes_few_steps(counting: GPT) -> None:
    driven = Driven(counting, speculate="ngram")
    driven.add(generation("a", PROMPT, max_tokens=30))
    assert steps_of(driven) == [
        [3],  # those of the prompt
        [4, 5],
        [6, 7, 8],
        list(range(9, 15)),
        list(range(15, 23)),
        list(range(23, 31)),
        [31, 32],  # no row is computed for a token that may not be generated
    ]
    assert (driven.drafted_tokens, driven.accepted_tokens) == (23, 23)
    assert driven.outcomes["a", 0].ended.reason is FinishReason.LENGTH


def test_drafts_fill_the_context(counting: GPT) -> None:
    context = counting.config.context_length
    request = generation("a", PROMPT, max_tokens=context - len(PROMPT), logprobs=1)
    driven, expected = both(counting, request)
    assert driven.outcomes["a", 0].computed == expected["a", 0]
    assert driven.outcomes["a", 0].token_ids == [i % COUNT for i in range(3, context - COUNT)]


@pytest.mark.parametrize("stop", range(3, 33))
def test_stop_token_inside_a_draft_ends_the_text(counting: GPT, stop: int) -> None:
    request = generation("a", PROMPT, max_tokens=30, stop_token_ids=frozenset({stop}))
    driven, expected = both(counting, request)
    outcome = driven.outcomes["a", 0]
    assert outcome.computed == expected["a", 0]
    assert outcome.token_ids == list(range(3, stop + 1))
    assert outcome.ended.stop_token_id == stop
    steps = len(outcome.token_ids) - 1 - driven.accepted_tokens
    assert steps == next(i for i, last in enumerate([3, 5, 8, 14, 22, 30, 32]) if stop <= last)


def test_drafted_row_that_is_not_finite_fails_only_if_reached(counting: GPT) -> None:
    """A sequence that reaches a position with non-finite numbers ends there and keeps its earlier
    tokens. A sequence that computed the position only for a draft is not affected."""
    broken = counting_gpt()
    broken.position_embedding.weight[64] = torch.nan  # after the prompt's blocks, at token 24
    stopping = params(60, stop_token_ids=frozenset({23}), logprobs=1)
    driven, expected = both(broken, generation("a", PROMPT, sampling=stopping))
    assert driven.outcomes["a", 0].computed == expected["a", 0]
    assert driven.outcomes["a", 0].ended.reason is FinishReason.STOP
    assert driven.drafted_tokens == 1 + 2 + 5 + 7 + 7, "there was a row at 64"
    driven, expected = both(broken, generation("a", PROMPT, sampling=params(60, logprobs=1)))
    assert driven.outcomes["a", 0].computed == expected["a", 0]
    assert driven.outcomes["a", 0].ended.reason is FinishReason.ERROR
    assert driven.outcomes["a", 0].token_ids == list(range(3, 25))


def test_constrained_sequence_has_no_drafts(counting: GPT) -> None:
    sampling = params(40, constraint=Steps(COUNT, by=2), logprobs=1)
    driven, expected = both(counting, generation("a", PROMPT, sampling=sampling))
    assert driven.outcomes["a", 0].computed == expected["a", 0]
    assert driven.drafted_tokens == 0


@pytest.mark.parametrize("sequences", [1, 3, 8, DRAFTED_ROWS - 1, DRAFTED_ROWS, 20])
def test_drafted_step_stays_within_its_rows(counting: GPT, sequences: int) -> None:
    config: dict[str, Any] = {"slots": 20, "prefill_chunk": 2048, "prefix_reuse": False}
    driven = Driven(counting, speculate="ngram", **config)
    for i in range(sequences):
        driven.add(generation(str(i), PROMPT, max_tokens=40))
    while driven.engine.has_work():
        result = driven.step()
        if result.drafted_tokens:
            assert result.decoded_sequences + result.drafted_tokens <= DRAFTED_ROWS
    assert (driven.accepted_tokens > 0) == (sequences < DRAFTED_ROWS)
    for outcome in driven.outcomes.values():
        assert outcome.token_ids == [i % COUNT for i in range(3, 43)]
