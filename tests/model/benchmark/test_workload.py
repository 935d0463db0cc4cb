"""Workload: defaults that fit, refusals with numbers, prompts that share nothing."""

from typing import Any

import pytest

from logitd.model.benchmark.workload import (
    FEWEST_STEPS,
    Workload,
    WorkloadError,
    choose_workload,
    tokens_for,
)
from tests.model.factories import VOCAB_SIZE, tiny_config


def choose(context: int = 512, **asked: Any) -> Workload:
    values = {
        "batches": (1, 8, 32),
        "prompt_tokens": None,
        "tokens": 64,
        "rounds": 3,
        "prefill_chunk": 256,
    }
    return choose_workload(tiny_config(context_length=context), **(values | asked))


@pytest.mark.parametrize(
    ("context", "prompt"), [(4096, 256), (512, 256), (320, 256), (319, 255), (128, 64), (65, 1)]
)
def test_prompts_are_as_long_as_usual_or_as_fits(context: int, prompt: int) -> None:
    assert choose(context, batches=(1,)).prompt_tokens == prompt


def test_what_was_asked_for_is_kept() -> None:
    workload = choose(prompt_tokens=100, batches=(4, 2))
    assert workload == Workload(
        batches=(4, 2), prompt_tokens=100, tokens=64, rounds=3, vocab_size=VOCAB_SIZE,
        prefill_chunk=256,
    )  # fmt: skip
    assert workload.largest == 4


@pytest.mark.parametrize(
    ("batches", "counts"), [((1,), (1,)), ((2, 4), (1, 4)), ((1, 32), (1, 8)), ((8,), (1, 8))]
)
def test_one_prompt_and_several_are_prefilled(
    batches: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    assert choose(batches=batches).prefill_counts == counts


@pytest.mark.parametrize(
    ("context", "asked", "numbers"),
    [
        (512, {"prompt_tokens": 449},
         "prompt_tokens is 449 and tokens is 64: together 513, the model's context is 512"),
        (64, {}, "prompt_tokens is 1 and tokens is 64: together 65, the model's context is 64"),
        (512, {"tokens": 38}, "tokens is 38, too few for a batch of 32: of prompts of 256 tokens a "
         "step computes 256 positions, so the first sequence has 32 tokens when the last prompt is "
         "computed, and a speed is taken over 8 steps of the whole batch at least. Raise tokens to "
         "40, or ask for smaller batches or shorter prompts"),
        (512, {"tokens": 8, "batches": (1,)}, "tokens is 8, too few for a batch of 1: "),
        (320, {"batches": (64,)}, "at least. Ask for smaller batches or shorter prompts"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_numbers(
    context: int, asked: dict[str, Any], numbers: str
) -> None:
    with pytest.raises(WorkloadError) as caught:
        choose(context, **asked)
    assert numbers in str(caught.value)


def test_what_the_refusal_asks_for_is_enough() -> None:
    assert choose(tokens=40).tokens == 40
    assert choose(tokens=9, batches=(1,)).tokens == 9


@pytest.mark.parametrize(
    ("batch", "prompt", "chunk", "ahead"),
    [(1, 256, 256, 0), (2, 256, 256, 1), (32, 256, 256, 31), (8, 32, 256, 0), (9, 32, 256, 1),
     (4, 33, 256, 0), (5, 33, 256, 1), (3, 512, 256, 4), (2, 1, 32, 1)],
)  # fmt: skip
def test_the_first_sequence_is_ahead_of_the_last(
    batch: int, prompt: int, chunk: int, ahead: int
) -> None:
    tokens = tokens_for(FEWEST_STEPS, batch=batch, prompt_tokens=prompt, prefill_chunk=chunk)
    assert tokens == 1 + ahead + FEWEST_STEPS


def test_prompts_are_the_same_each_time_and_share_no_beginning() -> None:
    workload = choose()
    prompts = workload.prompts(32, "a")
    assert prompts == workload.prompts(32, "a")
    assert len({prompt[:4] for prompt in [*prompts, *workload.prompts(32, "b")]}) == 64
    assert {len(prompt) for prompt in prompts} == {256}
    assert {token_id for prompt in prompts for token_id in prompt} == set(range(VOCAB_SIZE))
