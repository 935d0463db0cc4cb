"""Stages of a forward pass, recorded and changed by the engine, compared with their definitions in
`tests/model/plain_stages.py`, for every family and every stage."""

import copy
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from logitd.model.inference.engine.cost import position_elements, split_activations
from logitd.model.inference.engine.requests import (
    Activations,
    AttentionWeights,
    HiddenStates,
    Logits,
    OutputsRequest,
    ScoreRequest,
)
from logitd.model.inference.engine.scheduler import STEP_ELEMENTS
from logitd.model.inference.interventions import Intervention, Operation, Span
from logitd.model.inference.options import KVCacheDType
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import stages_of
from tests.model.covering import few_families
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    Outcome,
    generation,
    outputs_request,
    params,
    random_prompt,
    run,
)
from tests.model.plain_stages import Change, plain_stages
from tests.profiles import examples

LENGTH = 75
PROMPT = random_prompt(random.Random(0), LENGTH, 257)


@pytest.fixture(scope="module", params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[request.param]))


@pytest.fixture(scope="module")
def exact(gpt: GPT) -> GPT:
    """The model in float64, so that any difference comes from the computation and not from
    rounding. Rows are returned in float32."""
    return copy.deepcopy(gpt).double()


def check_close(value: Tensor, expected: Tensor, what: str = "") -> None:
    """Allow differences of 1e-5 of the largest expected number, because the head always computes in
    float32."""
    expected = expected.to(value.dtype)
    finite = expected[expected.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if len(finite) else 1.0
    assert_close(value, expected, atol=1e-5 * scale, rtol=0, msg=lambda text: f"{what}: {text}")


def names(gpt: GPT) -> list[str]:
    return [stage.name for stage in stages_of(gpt.config)]


def ask(
    output: Any, *interventions: Intervention, positions: Sequence[int] | None = None
) -> OutputsRequest:
    return outputs_request("a", PROMPT, positions, output=output, interventions=interventions)


def by_stage(gpt: GPT, stages: Sequence[str], rows: Tensor, length: int) -> dict[str, Tensor]:
    return split_activations(rows, Activations(stages=tuple(stages)), gpt.config, length)


def recorded(gpt: GPT, request: OutputsRequest, **config: Any) -> dict[str, Tensor]:
    assert isinstance(request.output, Activations)
    rows = run(gpt, request, **config)[request.request_id, 0].values
    return by_stage(gpt, request.output.stages, rows, len(request.token_ids))


# Recording


@pytest.mark.parametrize("prefill_chunk", [32, 128])
def test_recorded_stages_match_their_definition(exact: GPT, prefill_chunk: int) -> None:
    gpt = exact
    stages = recorded(gpt, ask(Activations(stages=tuple(names(gpt)))), prefill_chunk=prefill_chunk)
    expected = plain_stages(gpt, PROMPT)
    assert list(stages) == names(gpt)
    assert set(stages) == set(expected)
    for name, value in stages.items():
        assert value.shape == expected[name].shape, name
        check_close(value, expected[name], name)


@few_families
@pytest.mark.parametrize("kept", get_args(KVCacheDType))
def test_recorded_stages_have_the_bits_of_their_own_outputs(gpt: GPT, kept: KVCacheDType) -> None:
    """Keys and values are returned either exactly or as the cache rounds them."""

    def rows(output: Any) -> Tensor:
        return run(gpt, ask(output), kv_cache_dtype=kept)["a", 0].values

    layers = range(gpt.config.n_layer)
    stages = recorded(gpt, ask(Activations(stages=tuple(names(gpt)))), kv_cache_dtype=kept)
    states = rows(HiddenStates(layers=tuple(range(len(layers) + 1))))
    weights = AttentionWeights(layers=tuple(layers), heads=tuple(range(gpt.config.n_head)))
    probs = rows(weights)
    assert torch.equal(stages["logits"], rows(Logits()))
    assert torch.equal(stages["embedding"], states[:, 0])
    for layer in layers:
        assert torch.equal(stages[f"blocks.{layer}.output"], states[:, layer + 1])
        assert torch.equal(stages[f"blocks.{layer}.attention.probs"], probs[:, layer])


@few_families
def test_chosen_positions_have_the_bits_of_all(gpt: GPT) -> None:
    output = Activations(stages=tuple(names(gpt)))
    every = recorded(gpt, ask(output))
    some = recorded(gpt, ask(output, positions=(0, 31, 32, 70)), prefill_chunk=32)
    for name, value in some.items():
        assert torch.equal(value, every[name][[0, 31, 32, 70]]), name


@few_families
def test_activations_in_more_steps_have_the_same_bits(
    gpt: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask(Activations(stages=tuple(names(gpt))))
    at_once = recorded(gpt, request)
    monkeypatch.setattr("logitd.model.inference.engine.scheduler.STEP_ELEMENTS", 1)
    outcome = run(gpt, request)["a", 0]
    assert len(outcome.rows) == 3, "a block of positions in each step"
    pieces = by_stage(gpt, names(gpt), outcome.values, LENGTH)
    for name, value in pieces.items():
        assert torch.equal(value, at_once[name]), name


def test_position_costs_its_number_of_elements(gpt: GPT) -> None:
    request = ask(Activations(stages=tuple(names(gpt))), positions=(3,))
    rows = run(gpt, request)["a", 0].values
    assert rows.shape == (1, position_elements(request, gpt.config))


# Changing


def covered(intervention: Intervention, length: int, prompt_length: int) -> Sequence[int]:
    """Positions of a text that an intervention changes."""
    match intervention.positions:
        case "all":
            return range(length)
        case "prompt":
            return range(prompt_length)
        case "generated":
            return range(prompt_length, length)
        case positions:
            return positions


def changed_by_hand(change: Intervention, numbers: Tensor, values: Tensor | None) -> Tensor:
    """Apply the operation of `change` to the chosen elements of one head at one position."""
    match change.operation:
        case "zero":
            return torch.zeros_like(numbers)
        case "scale":
            return numbers * change.factor
        case "clamp":
            return numbers.clip(change.minimum, change.maximum)
    assert values is not None
    return values if change.operation == "set" else numbers + change.factor * values


def change_by_hand(interventions: Sequence[Intervention], prompt_length: int) -> Change:
    """A `change` for `plain_stages` that applies the interventions to a whole text in plain
    torch."""

    def unit(direction: Any, index: int, like: Tensor) -> Tensor:
        row = direction if direction.ndim == 1 else direction[index]
        return torch.nn.functional.normalize(torch.from_numpy(row).to(like.dtype), dim=0)

    def of_row(change: Intervention, place: int, index: int | None, row: Tensor) -> Tensor:
        """Apply `change` to a row of a stage. `index` is the position of the row's head among the
        chosen heads."""
        values = change.values
        if values is not None:
            given = values[place % len(values)]
            values = torch.from_numpy(given if index is None else given[index]).to(row.dtype)
        if change.proportional_to is not None:
            values = values * (row @ unit(change.proportional_to, index or 0, row))
        if change.along is not None:
            direction = unit(change.along, index or 0, row)
            before = row @ direction
            return row + (changed_by_hand(change, before, values) - before) * direction
        chosen = range(len(row)) if change.units is None else change.units
        units = [column for column in chosen if column < len(row)]
        if values is not None:
            values = values[: len(units)]
        row = row.clone()
        row[units] = changed_by_hand(change, row[units], values)
        return row

    def change(name: str, value: Tensor) -> Tensor:
        for intervention in interventions:
            if intervention.stage != name:
                continue
            value = value.clone()
            for place, position in enumerate(covered(intervention, len(value), prompt_length)):
                if value.ndim == 2:
                    value[position] = of_row(intervention, place, None, value[position])
                    continue
                for index, head in enumerate(intervention.heads or range(value.shape[1])):
                    row = value[position, head]
                    value[position, head] = of_row(intervention, place, index, row)
        return value

    return change


PLACES: Sequence[tuple[int, ...] | Span] = ("all", "prompt", (0, 5, 33), (LENGTH - 1,), (31, 32))


def random_intervention(
    gpt: GPT,
    name: str,
    rng: random.Random,
    places: Sequence[tuple[int, ...] | Span] = PLACES,
    length: int = LENGTH,
) -> Intervention:
    (stage,) = [stage for stage in stages_of(gpt.config) if stage.name == name]
    shape = stage.shape(gpt.config, length)
    generator = np.random.default_rng(rng.randrange(2**32))
    fields: dict[str, Any] = {"operation": rng.choice(get_args(Operation))}
    fields["positions"] = positions = rng.choice(places)
    if stage.heads_axis and rng.random() < 0.6:
        fields["heads"] = some(shape[0], rng)
        shape = (len(fields["heads"]), *shape[1:])

    def numbers(*shape: int) -> Any:
        return generator.normal(size=shape).astype(np.float32)

    def direction() -> Any:
        return numbers(*rng.choice([shape, shape[-1:]]))

    has_directions = stage.kind.axes[-1] != "T"
    part = rng.choice(["whole", "units", "along"] if has_directions else ["whole", "units"])
    width = shape[-1]
    if part == "units":
        fields["units"] = some(width, rng)
        width = len(fields["units"])
    elif part == "along":
        fields["along"], width = direction(), 1
    match fields["operation"]:
        case "scale":
            fields["factor"] = rng.choice([0.5, -1.0, 2.0])
        case "clamp":
            fields |= rng.choice([{"minimum": 0.1}, {"maximum": -0.2}])
            fields |= rng.choice([{}, {"minimum": -0.3, "maximum": 0.25}])
        case "add" | "set":
            rows = rng.choice([1, 1 if isinstance(positions, str) else len(positions)])
            fields["values"] = numbers(rows, *shape[:-1], width)
            if fields["operation"] == "add":
                fields["factor"] = rng.choice([0.5, -1.0, 2.0])
                if has_directions and rng.random() < 0.5:
                    fields["proportional_to"] = direction()
    return Intervention(stage=name, **fields)


def some(count: int, rng: random.Random) -> tuple[int, ...]:
    """Ascending, distinct indices, at least one."""
    return tuple(sorted(rng.sample(range(count), rng.randint(1, count))))


def changeable(gpt: GPT) -> list[str]:
    return [stage.name for stage in stages_of(gpt.config) if stage.kind.changes]


@pytest.mark.parametrize("count", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_intervention_at_any_stage_matches_a_change_by_hand(exact: GPT, count: int | None) -> None:
    """Positions, heads and values are random. All later stages match the definition with the same
    change. The fast test checks only some stages."""
    gpt = exact
    rng = random.Random(gpt.config.n_head if count is None else count)
    everything = Activations(stages=tuple(names(gpt)))
    for name in changeable(gpt) if count is None else rng.sample(changeable(gpt), count):
        intervention = random_intervention(gpt, name, rng)
        stages = recorded(gpt, ask(everything, intervention), prefill_chunk=64)
        expected = plain_stages(gpt, PROMPT, change_by_hand([intervention], LENGTH))
        before = torch.arange(LENGTH)[:, None, None] - torch.arange(LENGTH)
        for stage, value in stages.items():
            wanted = expected[stage]
            if stage.endswith((".scores", ".probs")):  # masked positions are not compared
                window = gpt.config.window(int(stage.split(".")[1])) or LENGTH
                seen = (before >= 0) & (before < window)
                value, wanted = (torch.where(seen, part, 0) for part in (value, wanted))
            check_close(value, wanted, f"{intervention}, at {stage}")


@few_families
def test_projecting_out_twice_equals_once(exact: GPT) -> None:
    gpt, stage = exact, "blocks.1.output"
    direction = np.arange(1, gpt.config.d_model + 1, dtype=np.float32)
    out = Intervention(stage=stage, operation="zero", along=direction)
    once = recorded(gpt, ask(Activations(stages=(stage,)), out))[stage]
    twice = recorded(gpt, ask(Activations(stages=(stage,)), out, out))[stage]
    assert_close(twice, once)
    unit = direction / np.linalg.norm(direction)
    assert_close(once @ torch.from_numpy(unit), torch.zeros(LENGTH), atol=1e-5, rtol=0)
    subtract = Intervention(
        stage=stage, operation="add", factor=-1.0, values=unit[None], proportional_to=direction
    )
    assert_close(recorded(gpt, ask(Activations(stages=(stage,)), subtract))[stage], once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clamped_units_keep_their_bounds(dtype: torch.dtype) -> None:
    """A bound may be beyond the range of the dtype."""
    gpt, stage = tiny_gpt(tiny_config()).to(dtype), "blocks.0.mlp.hidden"
    units = (1, 2, 5)
    clamp = Intervention(stage=stage, operation="clamp", units=units, minimum=-0.125, maximum=0.25)
    output = Activations(stages=(stage,))
    before, after = (recorded(gpt, ask(output, *made))[stage] for made in ((), (clamp,)))
    expected = before.clone()
    expected[:, units] = before[:, units].clip(-0.125, 0.25)
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)
    wide = Intervention(stage=stage, operation="clamp", minimum=-1e30, maximum=1e30)
    assert torch.equal(recorded(gpt, ask(output, wide))[stage], before)


@few_families
def test_interventions_apply_in_order(gpt: GPT) -> None:
    stage = "blocks.1.output"
    one = np.ones((1, gpt.config.d_model), dtype=np.float32)
    add = Intervention(stage=stage, operation="add", values=one)
    double = Intervention(stage=stage, operation="scale", factor=2.0)
    output = Activations(stages=(stage,))
    plain = recorded(gpt, ask(output))[stage]
    assert_close(recorded(gpt, ask(output, add, double))[stage], 2 * (plain + 1))
    assert_close(recorded(gpt, ask(output, double, add))[stage], 2 * plain + 1)


def test_all_outputs_are_those_of_the_changed_forward(gpt: GPT) -> None:
    head = Intervention(stage="blocks.0.attention.heads", operation="zero", heads=(1,))
    sharp = Intervention(stage="blocks.1.attention.scores", operation="scale", factor=3.0)
    stages = recorded(gpt, ask(Activations(stages=tuple(names(gpt))), head, sharp))
    layers = tuple(range(gpt.config.n_layer))
    logits = run(gpt, ask(Logits(), head, sharp))["a", 0].values
    assert torch.equal(logits, stages["logits"])
    states = run(gpt, ask(HiddenStates(layers=(0, 2)), head, sharp))["a", 0].values
    assert torch.equal(states[:, 0], stages["embedding"])
    assert torch.equal(states[:, 1], stages["blocks.1.output"])
    weights = AttentionWeights(layers=layers, heads=(0, 3))
    probs = run(gpt, ask(weights, head, sharp))["a", 0].values
    assert torch.equal(probs[:, 1], stages["blocks.1.attention.probs"][:, [0, 3]])
    request = ScoreRequest(
        request_id="s", token_ids=tuple(PROMPT), interventions=(head, sharp), top=1
    )
    scored = run(gpt, request)["s", 0].prompt
    expected = logits.log_softmax(dim=-1)
    for position, token in enumerate(scored[1:]):
        assert token.chosen is not None
        assert token.chosen.logprob == pytest.approx(
            expected[position, PROMPT[position + 1]].item(), abs=1e-4
        )


@few_families
def test_generation_follows_the_changed_forward(exact: GPT) -> None:
    """Prompts, generated tokens, or both are changed. Each greedy token has the largest logit in a
    complete forward pass over the preceding text with the same changes."""
    gpt, prompt = exact, PROMPT[:40]
    spans: tuple[Span, ...] = ("prompt", "generated", "all")
    for span in spans:
        head = Intervention(
            stage="blocks.1.attention.heads", operation="zero", heads=(0, 2), positions=span
        )
        probs = Intervention(
            stage="blocks.0.attention.probs", operation="scale", factor=0.5, positions=span
        )
        key = Intervention(
            stage="blocks.1.attention.probs", operation="zero", units=(0, 7, 38), positions=span
        )
        neurons = Intervention(
            stage="blocks.1.mlp.hidden",
            operation="set",
            units=(0, 3),
            values=np.array([[1.5, -2.0]], dtype=np.float32),
            positions=span,
        )
        direction = np.arange(gpt.config.d_model, dtype=np.float32)
        stream = Intervention(
            stage="blocks.2.output", operation="clamp", minimum=2.0, along=direction, positions=span
        )
        changes = (head, probs, key, neurons, stream)
        request = generation("g", prompt, max_tokens=4, interventions=changes)
        tokens = run(gpt, request)["g", 0].token_ids
        text = list(prompt)
        for token in tokens:
            logits = plain_stages(gpt, text, change_by_hand(changes, len(prompt)))["logits"][-1]
            assert logits[token] >= logits.max() - 1e-6, f"{span}: {text[len(prompt) :]}"
            text.append(token)


@few_families
@pytest.mark.parametrize("count", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_patching_a_prompt_with_itself_changes_no_bit(gpt: GPT, count: int | None) -> None:
    """Only stages that are computed in the same way when changed are patched; they keep every bit.
    The fast test checks only some stages."""
    rng = random.Random(count)
    for name in changeable(gpt) if count is None else rng.sample(changeable(gpt), count):
        if name.endswith((".scores", ".probs")):
            continue  # computed differently if changed
        value = recorded(gpt, ask(Activations(stages=(name,))))[name]
        patch = Intervention(
            stage=name, operation="set", positions=tuple(range(LENGTH)), values=value.numpy()
        )
        logits = run(gpt, ask(Logits(), patch))["a", 0].values
        assert torch.equal(logits, run(gpt, ask(Logits()))["a", 0].values), name


# Next to other requests


@cache
def changed_and_plain() -> tuple[GPT, list[Any], dict[tuple[str, int], Outcome]]:
    """A model, requests for generations and for rows, with and without changes, and the outcomes of
    each request when it runs alone and its prompt is computed in one chunk."""
    gpt = tiny_gpt(tiny_config())
    rng = random.Random(3)
    requests: list[Any] = []
    for index in range(12):
        prompt = tuple(PROMPT[: 33 + index])
        changes = tuple(
            random_intervention(
                gpt,
                rng.choice(changeable(gpt)),
                rng,
                places=("all", "prompt", "generated", (0, len(prompt) - 1)),
                length=len(prompt),
            )
            for _ in range(rng.randint(1, 3))
        )
        changed = index % 3 > 0
        if index % 4 == 3:
            requests.append(
                outputs_request(f"r{index}", prompt, interventions=changes if changed else ())
            )
        else:
            requests.append(
                generation(
                    f"r{index}",
                    prompt,
                    sampling=params(rng.randint(1, 20), temperature=0.7, seed=index, logprobs=0),
                    interventions=changes if changed else (),
                    n=1 + index % 2,
                )
            )
    alone: dict[tuple[str, int], Outcome] = {}
    for request in requests:
        alone |= run(gpt, request, slots=3, prefill_chunk=128)
    return gpt, requests, alone


@settings(max_examples=examples(6))
@given(
    elements=st.sampled_from([1, 2**14, 2**16, 2**18, STEP_ELEMENTS]),
    slots=st.integers(1, 20),
    blocks=st.integers(1, 4),
)
def test_changed_sequences_and_others_keep_their_bits_in_a_batch(
    elements: int, slots: int, blocks: int
) -> None:
    """All requests run together. The limit on the elements of a step is sometimes so low that they
    must take turns. Prefixes with a change are not shared, although all prompts begin alike."""
    gpt, requests, alone = changed_and_plain()
    driven = Driven(gpt, slots=slots, prefill_chunk=blocks * BLOCK)
    driven.engine._scheduler.step_elements = elements
    driven.add(*requests)
    together = driven.drain()
    assert together.keys() == alone.keys()
    for key, outcome in alone.items():
        assert outcome.tokens == together[key].tokens
        if outcome.rows:
            assert torch.equal(outcome.values, together[key].values)
    for request in requests:
        if request.interventions:
            assert together[request.request_id, 0].ended.cached_tokens == 0
