"""Engine: steps, their events and counts, and outputs, which arrive only as credit is granted."""

import dataclasses
import random
from typing import Any

import pytest

from logitd.model.inference.engine.events import FinishEvent, FinishReason, OutputsChunk, TokenEvent
from logitd.model.inference.engine.requests import Logits, OutputsRequest
from logitd.model.inference.engine.sequence import CHUNKS_IN_FLIGHT
from logitd.model.inference.sampling.sampler import ListedIds
from logitd.model.transformer.gpt import GPT
from tests.model.inference.engine.harness import (
    Driven,
    FakeClock,
    assert_is_reference,
    counts,
    generation,
    outputs_request,
    params,
    random_prompt,
    run,
    small_gpt,
)
from tests.model.inference.engine.test_against_reference import check_rows, random_request


def test_prompt_yields_its_first_token_in_its_last_step(gpt: GPT) -> None:
    driven = Driven(gpt, prefill_chunk=32)
    driven.add(generation("a", [1] * 70, max_tokens=3))
    steps = [driven.step() for _ in range(5)]
    assert [step.prefilled_tokens for step in steps] == [32, 32, 6, 0, 0]
    assert [step.decoded_sequences for step in steps] == [0, 0, 0, 1, 1]
    kinds = [[type(event) for event in step.events] for step in steps]
    assert kinds == [[], [], [TokenEvent], [TokenEvent], [TokenEvent, FinishEvent]]
    assert not driven.engine.has_work()


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_steps_count_all_computed_tokens(gpt: GPT, speculate: str) -> None:
    driven = Driven(gpt, slots=3, speculate=speculate)
    rng = random.Random(1)
    shared = random_prompt(rng, 128)
    for name in "abcdefghijkl":
        driven.add(random_request(rng, name, gpt, shared))
    prefilled = decoded = 0
    while driven.engine.has_work():
        result = driven.step()
        for event in result.events:
            if isinstance(event, OutputsChunk):
                driven.engine.grant(event.request_id)
        prefilled += result.prefilled_tokens
        decoded += result.decoded_sequences
    ends = [outcome.ended for outcome in driven.outcomes.values()]
    assert prefilled == sum((end.price or 0) - end.cached_tokens for end in ends)
    beyond_the_first = sum(max(0, end.completion_tokens - 1) for end in ends)
    assert decoded + driven.accepted_tokens == beyond_the_first
    assert any(end.cached_tokens for end in ends)


def test_times_are_on_the_engines_clock(gpt: GPT) -> None:
    clock = FakeClock()
    driven = Driven(gpt, clock, slots=1, prefill_chunk=32)
    driven.add(generation("first", [1] * 40, max_tokens=3))
    driven.add(generation("second", [2], max_tokens=1))
    while driven.engine.has_work():
        clock.now += 1
        driven.step()
    first, second = (driven.outcomes[name, 0].ended.times for name in ("first", "second"))
    assert dataclasses.astuple(first) == (100, 101, 102, 104)
    assert dataclasses.astuple(second) == (100, 105, 105, 105)
    driven.engine.accept(generation("third", [2], max_tokens=1), arrived=42.0)
    driven.accepted.add(("third", 0))
    driven.drain()
    assert driven.outcomes["third", 0].ended.times.arrived == 42.0


def test_shared_prefix_is_copied_and_counted(gpt: GPT) -> None:
    prompt = random_prompt(random.Random(3), 100)
    driven = Driven(gpt)
    for name, token_ids in {
        "cold": prompt,
        "warm": prompt,
        "longer": [*prompt, 1, 2, 3],
        "shorter": prompt[:64],
        "parted": [*prompt[:40], *prompt[:40]],
    }.items():
        driven.add(generation(name, token_ids, max_tokens=20))
        driven.drain()
    cached = {name: outcome.ended.cached_tokens for (name, _), outcome in driven.outcomes.items()}
    assert cached == {"cold": 0, "warm": 96, "longer": 96, "shorter": 32, "parted": 32}
    for (name, _), outcome in driven.outcomes.items():
        if name in ("cold", "warm"):
            assert_is_reference(gpt, prompt, params(20), 0, outcome.token_ids)


def test_stats_count_sequences_and_slots(gpt: GPT) -> None:
    driven = Driven(gpt, slots=2)
    engine = driven.engine
    assert engine.slots == 2
    assert engine.kv_cache_bytes == 2 * 2 * 2 * 2 * 128 * 8 * 4
    for i in range(5):
        driven.add(generation(str(i), [i], max_tokens=9))
    assert counts(engine) == (5, 0, 2, 0)
    driven.step()
    assert counts(engine) == (3, 2, 2, 2)
    assert engine.stats().begun_tokens == 2, "two prompts of a token each"
    driven.drain()
    assert counts(engine) == (0, 0, 2, 0)


def test_rows_come_in_granted_pieces(gpt: GPT) -> None:
    driven = Driven(gpt, prefill_chunk=128)
    driven.engine._scheduler.step_elements = 1  # pieces of one block
    request = outputs_request("rows", random_prompt(random.Random(0), 120))
    driven.add(request)
    driven.add(generation("other", [3], max_tokens=20))
    while driven.engine.has_work():
        driven.step()
    assert driven.outcomes["other", 0].ended.reason is FinishReason.LENGTH
    pieces = driven.outcomes["rows", 0].rows
    assert [event.positions for event in pieces] == [tuple(range(32)), tuple(range(32, 64))]
    assert len(pieces) == CHUNKS_IN_FLIGHT
    driven.engine.grant("rows")
    assert driven.engine.has_work()
    driven.step()
    assert not driven.engine.has_work()
    assert len(pieces) == CHUNKS_IN_FLIGHT + 1
    driven.engine.grant("rows")
    driven.drain()
    check_rows(gpt, request, driven.outcomes["rows", 0])


def test_engine_refuses_a_model_in_training_mode() -> None:
    """Such a model would apply its dropout."""
    with pytest.raises(ValueError, match="training mode"):
        Driven(small_gpt(dropout=0.1).train())


@pytest.mark.parametrize(
    "request_",
    [
        generation("a", [1, 2], n=3, max_tokens=5, allowed_token_ids=tuple(range(30)), seed=1),
        OutputsRequest(
            request_id="a",
            token_ids=(3,) * 70,
            positions=tuple(range(70)),
            output=Logits(processing=params(max_tokens=1, logit_bias={3: 1.0})),
        ),
    ],
)
def test_lists_of_ids_become_tensors_once_per_request(
    gpt: GPT, request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ListedIds] = []

    def listed(*args: Any) -> ListedIds:
        made.append(ListedIds(*args))
        return made[-1]

    monkeypatch.setattr("logitd.model.inference.engine.outputs.ListedIds", listed)
    run(gpt, request_, prefill_chunk=32)
    assert len(made) == 1
