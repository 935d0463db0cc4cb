"""Attributions in the engine: each step computes at most one piece of one attribution, alongside
the tokens of other requests. The results have the same bits as when the prompt runs alone, and an
attribution can end at any time."""

import copy
import ctypes
import gc
import random
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from logitd.model.inference.attribution.attribute import attributing
from logitd.model.inference.attribution.gradients import Pieces
from logitd.model.inference.attribution.task import (
    METHODS,
    Attribution,
    AttributionTask,
    kept_elements,
)
from logitd.model.inference.circuit.find import finding
from logitd.model.inference.circuit.task import CircuitTask, circuit_elements
from logitd.model.inference.engine import runner
from logitd.model.inference.engine.attributions import AT_ONCE
from logitd.model.inference.engine.cost import SHORTEST_PASS, output_elements, prices
from logitd.model.inference.engine.events import FinishReason
from logitd.model.inference.engine.requests import AttributionRequest, Request
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.options import Quantization
from logitd.model.transformer.gpt import GPT
from tests.model.covering import SOME_FAMILIES
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    FakeClock,
    Outcome,
    counts,
    generation,
    outputs_request,
    random_prompt,
    run,
    score_request,
    small_gpt,
)

PROMPT = random_prompt(random.Random(0), 40)
STAGES = ("blocks.0.attention.probs", "blocks.1.attention.heads")
EVERYTHING: dict[str, Any] = {"methods": METHODS, "steps": 2, "stages": STAGES}


def asked(length: int = len(PROMPT), **fields: Any) -> AttributionTask:
    return AttributionTask(**({"position": length - 1} | fields))


def ask(
    request_id: str = "why",
    prompt: Iterable[int] = PROMPT,
    *,
    deadline: float | None = None,
    caller: str = "",
    priority: int = 0,
    **fields: Any,
) -> AttributionRequest:
    token_ids = tuple(prompt)
    return AttributionRequest(
        request_id=request_id,
        token_ids=token_ids,
        task=asked(len(token_ids), **fields),
        deadline=deadline,
        caller=caller,
        priority=priority,
    )


def steps_to_end(driven: Driven, request_id: str) -> int:
    """The number of steps until a request ends."""
    steps = 0
    while driven.outcomes.get((request_id, 0), Outcome()).finish is None:
        driven.step()
        steps += 1
    return steps


def others() -> list[Request]:
    rng = random.Random(1)
    return [
        generation("greedy", random_prompt(rng, 70), max_tokens=30),
        generation("drawn", random_prompt(rng, 33), n=3, max_tokens=20, temperature=1.0),
        outputs_request("rows", random_prompt(rng, 90)),
        score_request("score", random_prompt(rng, 50), random_prompt(rng, 9)),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_attribution_of_the_engine_has_the_bits_of_attribute(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    expected = attributing(gpt, PROMPT, asked(**EVERYTHING)).result()
    outcome = run(gpt, ask(**EVERYTHING))["why", 0]
    assert outcome.attribution == expected
    assert outcome.ended.reason is FinishReason.STOP
    assert (outcome.ended.prompt_tokens, outcome.ended.completion_tokens) == (len(PROMPT), 0)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_circuit_of_the_engine_has_the_bits_of_a_single_run(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    task = CircuitTask(position=len(PROMPT) - 1, parts=30)
    expected = finding(gpt, PROMPT, task).result()
    request = AttributionRequest(request_id="circuit", token_ids=tuple(PROMPT), task=task)
    outcomes = run(gpt, request, *others(), ask())
    assert outcomes["circuit", 0].attribution == expected
    assert outcomes["circuit", 0].ended.reason is FinishReason.STOP
    assert outcomes["why", 0].attribution == attributing(gpt, PROMPT, asked()).result()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attribution_and_batch_change_no_bit_of_each_other(
    native: bool, dtype: torch.dtype, library: ctypes.CDLL
) -> None:
    gpt = small_gpt(d_model=48, head_dim=16).to(dtype)
    how: dict[str, Any] = {}
    if native:
        how["make_decoder"] = partial(NativeDecoder, library, threads=2)
    without = run(copy.deepcopy(gpt), *others(), **how)
    alone = attributing(copy.deepcopy(gpt), PROMPT, asked(**EVERYTHING)).result()
    requests = [ask("why", **EVERYTHING), *others(), ask("and why", **EVERYTHING)]
    random.Random(2).shuffle(requests)
    together = run(copy.deepcopy(gpt), *requests, **how)
    for key, outcome in without.items():
        assert together[key].computed == outcome.computed, key
    for name in ("why", "and why"):
        attribution = together[name, 0].attribution
        assert isinstance(attribution, Attribution)
        assert attribution == alone
        for stage in STAGES:
            assert np.array_equal(attribution.gradients[stage], alone.gradients[stage])


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_attribution_uses_quantized_weights(library: ctypes.CDLL, quantize: Quantization) -> None:
    """The decoder quantizes the model's weights in place, so torch computes the attribution with
    quantized weights."""
    gpt = small_gpt(d_model=48, head_dim=16)
    exact = attributing(copy.deepcopy(gpt), PROMPT, asked()).result()
    decoder = partial(NativeDecoder, library, threads=1, quantize=quantize)
    driven = Driven(gpt, make_decoder=decoder)
    driven.add(ask())
    outcome = driven.drain()["why", 0]
    assert outcome.attribution == attributing(gpt, PROMPT, asked()).result() != exact


def test_attribution_lets_others_decode_in_every_step(gpt: GPT) -> None:
    driven = Driven(gpt)
    driven.add(generation("stream", [1, 2, 3], max_tokens=60))
    driven.step()
    for name in ("why", "and why", "why not"):
        driven.add(ask(name, **EVERYTHING))
    for _ in range(40):
        result = driven.step()
        assert (result.decoded_sequences, result.attribution_pieces) == (1, 1)
    assert driven.outcomes["stream", 0].finish is None
    assert len(driven.outcomes["stream", 0].tokens) == 41
    driven.drain()


def test_attribution_needs_no_slot(gpt: GPT) -> None:
    driven = Driven(gpt, slots=1)
    driven.add(generation("stream", [1], max_tokens=100))
    driven.step()
    driven.add(ask())
    driven.step()
    assert counts(driven.engine) == (0, 2, 1, 1)
    while driven.outcomes.get(("why", 0), Outcome()).finish is None:
        driven.step()
    assert driven.outcomes["stream", 0].finish is None


def test_attributions_take_turns(gpt: GPT) -> None:
    """A long attribution does not delay a short one; a third waits until one of them ends."""
    driven = Driven(gpt)
    long = ask("long", methods=("integrated_gradients",), steps=50)
    driven.add(long, ask("short"), ask("third"))
    driven.step()
    stats = driven.engine.stats()
    assert (stats.waiting, stats.running) == (3 - AT_ONCE, AT_ONCE)
    assert stats.begun_tokens == sum(prices(long, gpt.config) + prices(ask(), gpt.config))
    outcomes = driven.drain()
    ends = sorted(outcomes, key=list(outcomes).index)
    assert [name for name, _ in ends] == ["short", "third", "long"]


def test_attributions_begin_by_priority_and_caller(gpt: GPT) -> None:
    driven = Driven(gpt)
    for name, caller, priority in (
        ("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0), ("b1", "b", 0), ("c1", "c", -1),
    ):  # fmt: skip
        driven.add(ask(name, caller=caller, priority=priority))
    assert [name for name, _ in driven.drain()] == ["c1", "a1", "b1", "a2", "a3"]


def test_attribution_of_another_caller_begins_at_once(gpt: GPT) -> None:
    """Two long attributions of one caller once made the attributions of all other callers wait."""
    alone, driven = Driven(gpt), Driven(gpt)
    alone.add(ask("b"))
    for name in ("a1", "a2", "a3"):
        driven.add(ask(name, caller="a", methods=("integrated_gradients",), steps=50))
    driven.step()
    driven.add(ask("b", caller="b"))
    assert steps_to_end(driven, "b") <= 2 * steps_to_end(alone, "b")
    stats = driven.engine.stats()
    assert (stats.waiting, stats.running) == (1, AT_ONCE)


def test_deadline_ends_attribution_between_two_pieces(gpt: GPT) -> None:
    clock = FakeClock()
    driven = Driven(gpt, clock)
    driven.add(ask(methods=("integrated_gradients",), deadline=clock.now + 10))
    driven.add(generation("stream", [1], max_tokens=50))
    for _ in range(5):
        driven.step()
    clock.now += 11
    driven.step()
    assert driven.outcomes["why", 0].ended.reason is FinishReason.TIMEOUT
    assert driven.outcomes["why", 0].attribution is None
    assert driven.drain()["stream", 0].ended.reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", [0, 1, 3, 1000])
def test_attribution_frees_its_memory_at_its_end(
    gpt: GPT, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Pieces[Attribution]]] = []

    def make(*arguments: Any) -> Pieces[Attribution]:
        pieces = attributing(*arguments)
        made.append(weakref.ref(pieces))
        return pieces

    monkeypatch.setattr(runner, "attributing", make)
    driven = Driven(gpt)
    driven.add(ask(methods=("integrated_gradients",)))
    for _ in range(steps):
        if driven.engine.has_work():
            driven.step()
    driven.abort("why")
    reason = FinishReason.ABORT if steps < 1000 else FinishReason.STOP
    assert driven.outcomes["why", 0].ended.reason is reason
    assert not driven.engine.has_work()
    assert counts(driven.engine)[:2] == (0, 0)
    gc.collect()
    assert [reference() for reference in made] == [None] * min(steps, 1)


def test_attribution_that_fails_ends_alone(gpt: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(gpt)
    driven.add(ask())
    driven.add(generation("stream", [1], max_tokens=9))
    driven.step()

    def fail(pieces: Pieces[Attribution]) -> None:
        raise MemoryError("no room for a block")

    monkeypatch.setattr(Pieces, "advance", fail)
    outcomes = driven.drain()
    assert "MemoryError: no room for a block" in (outcomes["why", 0].ended.error or "")
    assert outcomes["stream", 0].ended.reason is FinishReason.LENGTH


def test_failing_model_leaves_attribution_alone(gpt: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(gpt)
    driven.add(ask())
    driven.add(generation("stream", [1], max_tokens=9))
    driven.step()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(driven.engine._runner, "run", fail)
    outcomes = driven.drain()
    assert outcomes["stream", 0].ended.reason is FinishReason.ERROR
    assert outcomes["why", 0].attribution == attributing(gpt, PROMPT, asked()).result()


@pytest.mark.parametrize("method", METHODS)
def test_attribution_that_is_not_finite_is_an_error(method: str) -> None:
    gpt = small_gpt()
    gpt.token_embedding.weight[PROMPT[3]] = float("nan")
    outcome = run(gpt, ask(methods=(method,), token_id=(PROMPT[3] + 1) % 40, steps=2))["why", 0]
    assert "not finite" in (outcome.ended.error or "")


def test_circuit_that_is_not_finite_is_an_error() -> None:
    gpt = small_gpt()
    gpt.token_embedding.weight[PROMPT[3]] = float("nan")
    task = CircuitTask(position=len(PROMPT) - 1)
    request = AttributionRequest(request_id="circuit", token_ids=tuple(PROMPT), task=task)
    assert "not finite" in (run(gpt, request)["circuit", 0].ended.error or "")


def test_attributions_end_before_weights_are_swapped() -> None:
    old, new = small_gpt(), tiny_gpt(small_gpt().config, seed=5)
    driven = Driven(old)
    names = [f"why {i}" for i in range(AT_ONCE + 1)]
    for name in names:
        driven.add(ask(name))
    driven.step()
    driven.swap_weights(new)
    driven.add(ask("late"))
    outcomes = driven.drain()
    for name in (*names, "late"):
        weights = new if name == "late" else old
        assert outcomes[name, 0].attribution == attributing(weights, PROMPT, asked()).result()


def test_price_is_the_passes_over_the_text(gpt: GPT) -> None:
    text, counted = len(PROMPT), max(len(PROMPT), SHORTEST_PASS)
    for request, passes in (
        (ask(), 3),
        (ask(methods=("direct",)), 1),
        (ask(methods=("integrated_gradients",), steps=10), 1 + 1 + 30),
        (ask(methods=METHODS, steps=10), 3 + 1 + 30),
    ):
        assert prices(request, gpt.config) == [passes * counted]
        assert run(gpt, request)["why", 0].ended.price == passes * counted
    task = asked()
    circuit = CircuitTask(position=text - 1)
    traced = AttributionRequest(request_id="circuit", token_ids=tuple(PROMPT), task=circuit)
    assert prices(traced, gpt.config) == [circuit.passes * counted]
    assert output_elements(traced, gpt.config) == circuit_elements(circuit, gpt.config)
    assert output_elements(ask(), gpt.config) == kept_elements(task, gpt.config)
    assert kept_elements(task, gpt.config) > text * gpt.config.n_layer * gpt.config.d_model


@pytest.mark.parametrize("seed", range(6))
def test_attributions_in_random_mixes_all_end(gpt: GPT, seed: int) -> None:
    rng = random.Random(seed)
    driven, pool = Driven(gpt, slots=2), others()
    for number in range(40):
        if rng.random() < 0.4:
            methods = tuple(rng.sample(METHODS, rng.randint(1, 3)))
            prompt, steps = random_prompt(rng, rng.randint(1, 60)), rng.randint(1, 3)
            driven.add(
                ask(f"{number}", prompt, caller=rng.choice("ab"), methods=methods, steps=steps)
            )
        elif pool and rng.random() < 0.3:
            driven.add(pool.pop())
        if rng.random() < 0.2:
            driven.abort(f"{rng.randint(0, number)}")
        for _ in range(rng.choice([0, 1, 4])):
            for event in driven.step().events:
                driven.engine.grant(event.request_id)
    outcomes = driven.drain()
    assert outcomes.keys() == driven.accepted
    assert {outcome.ended.reason for outcome in outcomes.values()} <= {
        FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT,
    }  # fmt: skip
