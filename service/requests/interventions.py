"""Interventions: from those of a body to those that the engine carries out.

Names with `*` become one intervention for each layer, negative indices count from the end, and
`from` and `minus` become values: what another prompt has at the stage, which the engine computes
first, as an output like any other. What then does not fit the model's shape is refused when the
request is submitted (`model/inference/interventions.py`).
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from fastapi import Request

from model.inference.engine.cost import split_activations
from model.inference.engine.requests import Activations, OutputsRequest
from model.inference.engine.validation import check_request, resolve_heads
from model.inference.errors import InvalidRequest
from model.inference.interventions import (
    PARAM,
    Intervention,
    Span,
    changeable_stages,
    check_intervention,
)
from model.transformer.config import GPTConfig
from model.transformer.stages import Stage
from service.core.gather import gather
from service.core.ids import new_id
from service.core.models import Served
from service.requests.body import unless_gone
from service.requests.encode import encode_all
from service.requests.positions import resolve_positions
from service.schemas import interventions as schemas

MAX_CARRIED_OUT = 2**13
"""Interventions of a request once there is one for each layer that it names and each prompt. Every
step carries them out, and each is looked at several times before."""

Rows = npt.NDArray[np.float32]
"""Values of a stage: (positions, ...)."""
TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is read of another prompt; equal ones are computed once."""

    token_ids: TokenIds
    positions: tuple[int, ...]
    stages: tuple[str, ...]
    heads: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Change:
    """An intervention of a body on one of its prompts, with what it reads."""

    index: int
    asked: schemas.Intervention
    stages: tuple[Stage, ...]
    positions: tuple[int, ...] | Span
    heads: tuple[int, ...] | None
    source: _Reading | None
    minus: _Reading | None


Readings = dict[_Reading, dict[str, Rows]]


async def resolve_interventions(
    asked: Sequence[schemas.Intervention],
    prompts: Sequence[TokenIds],
    served: Served,
    request: Request,
    *,
    deadline: float | None,
    generates: bool = False,
) -> list[tuple[Intervention, ...]]:
    """The interventions on each prompt. `generates` says whether anything follows the prompts.
    Raises InvalidRequest for those that cannot be carried out."""
    if not asked:
        return [()] * len(prompts)
    sources = [await _encode_sources(intervention, served) for intervention in asked]
    config = served.checkpoint.config
    stages = [
        _stages(index, intervention.stage, config) for index, intervention in enumerate(asked)
    ]
    if (count := len(prompts) * sum(map(len, stages))) > MAX_CARRIED_OUT:
        raise InvalidRequest(
            f"there would be {count} interventions, one for each layer that is named and each "
            f"prompt; {MAX_CARRIED_OUT} are allowed. Send fewer prompts at once",
            PARAM,
        )
    changes = []
    for prompt in prompts:
        await asyncio.sleep(0)  # hundreds on each of many prompts are not to hold up others
        changes.append([
            _change(index, intervention, stages[index], sources[index], prompt, config,
                    generates=generates)
            for index, intervention in enumerate(asked)
        ])  # fmt: skip
    readings = await _compute(changes, served, request, deadline)
    resolved = []
    for prompt, of_prompt in zip(prompts, changes, strict=True):
        await asyncio.sleep(0)
        interventions = tuple(
            intervention
            for change in of_prompt
            for intervention in _interventions(change, readings, prompt, config)
        )
        resolved.append(interventions)
    return resolved


async def _encode_sources(
    asked: schemas.Intervention, served: Served
) -> tuple[TokenIds | None, TokenIds | None]:
    """The prompts of `from` and of `minus`."""
    encoded: list[TokenIds | None] = []
    for source in (asked.source, asked.minus):
        prompts = [] if source is None else await encode_all([source.prompt], PARAM, served)
        encoded.append(prompts[0] if prompts else None)
    return encoded[0], encoded[1]


def _change(
    index: int,
    asked: schemas.Intervention,
    stages: tuple[Stage, ...],
    sources: tuple[TokenIds | None, TokenIds | None],
    prompt: TokenIds,
    config: GPTConfig,
    *,
    generates: bool,
) -> _Change:
    try:
        heads = None if asked.heads is None else resolve_heads(asked.heads, stages, config)
        if asked.positions == "generated" and not generates:
            raise InvalidRequest("positions are 'generated', and nothing is generated here", PARAM)
        positions = _positions(asked.positions, len(prompt))
        source, minus = (
            None if ids is None else _reading(ids, body, asked, stages, heads, config)
            for ids, body in zip(sources, (asked.source, asked.minus), strict=True)
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"interventions[{index}]: {error}", PARAM) from error
    return _Change(index, asked, stages, positions, heads, source, minus)


def _stages(index: int, name: str, config: GPTConfig) -> tuple[Stage, ...]:
    """The stages of a name or pattern; each may be changed."""
    try:
        return changeable_stages(name, config)
    except InvalidRequest as error:
        raise InvalidRequest(f"interventions[{index}]: {error}", PARAM) from error


def _positions(asked: object, length: int) -> tuple[int, ...] | Span:
    match asked:
        case "all" | "prompt" | "generated" as span:
            return span
        case positions:
            return resolve_positions(positions, length)  # type: ignore[arg-type]


def _reading(
    token_ids: TokenIds,
    body: schemas.Source | None,
    asked: schemas.Intervention,
    stages: Sequence[Stage],
    heads: tuple[int, ...] | None,
    config: GPTConfig,
) -> _Reading:
    """What a `from` or `minus` reads, once it is known that the engine can compute it."""
    assert body is not None
    choice = asked.positions if body.positions is None else body.positions
    positions = _positions(choice, len(token_ids))
    if isinstance(positions, str):
        positions = tuple(range(len(token_ids)))
    names = tuple(stage.name for stage in stages)
    reading = _Reading(token_ids, positions, names, heads)
    try:
        check_request(_request(reading, "", None), config)
    except InvalidRequest as error:
        raise InvalidRequest(f"what is read from another prompt: {error}", PARAM) from error
    return reading


async def _compute(
    changes: Sequence[Sequence[_Change]], served: Served, request: Request, deadline: float | None
) -> Readings:
    """The rows of everything that is read, by stage."""
    wanted = {
        reading: None
        for of_prompt in changes
        for change in of_prompt
        for reading in (change.source, change.minus)
        if reading is not None
    }
    if not wanted:
        return {}
    requests = [_request(reading, served.caller, deadline) for reading in wanted]
    computed = await unless_gone(request, gather(served.session.submit(requests, more=True)))
    config = served.checkpoint.config
    readings: Readings = {}
    for reading, engine_request in zip(wanted, requests, strict=True):
        rows = np.stack(computed.rows[engine_request.request_id])  # (positions, elements)
        output = engine_request.output
        assert isinstance(output, Activations)
        readings[reading] = split_activations(rows, output, config, len(reading.token_ids))
    return readings


def _request(reading: _Reading, caller: str, deadline: float | None) -> OutputsRequest:
    return OutputsRequest(
        request_id=new_id("reading"),
        token_ids=reading.token_ids,
        positions=reading.positions,
        output=Activations(stages=reading.stages, heads=reading.heads),
        caller=caller,
        deadline=deadline,
    )


def _interventions(
    change: _Change, readings: Readings, prompt: TokenIds, config: GPTConfig
) -> Iterator[Intervention]:
    """One for each stage, known to fit the model."""
    asked = change.asked
    for stage in change.stages:
        try:
            values = _values(change, readings, stage, config, len(prompt))
            intervention = Intervention(
                stage=stage.name,
                operation=asked.operation,
                positions=_covered(change, values, len(prompt)),
                heads=change.heads,
                factor=1.0 if asked.factor is None else asked.factor,
                values=values,
            )
            check_intervention(intervention, config, len(prompt))
        except InvalidRequest as error:
            raise InvalidRequest(f"interventions[{change.index}]: {error}", PARAM) from error
        yield intervention


def _values(
    change: _Change, readings: Readings, stage: Stage, config: GPTConfig, length: int
) -> Rows | None:
    """(1, ...) or (positions, ...), of the chosen heads; None where the operation needs none."""
    asked = change.asked
    if asked.values is not None:
        return _given(asked.values, len(stage.shape(config, length)))
    if change.source is None:
        return None
    rows = readings[change.source][stage.name]
    if asked.operation == "set":
        return rows
    mean = rows.mean(axis=0, dtype=np.float64)
    if change.minus is not None:
        other = readings[change.minus][stage.name].mean(axis=0, dtype=np.float64)
        if other.shape != mean.shape:
            raise InvalidRequest(
                f"{stage.name} has the shape {list(mean.shape)} in `from` and {list(other.shape)} "
                "in `minus`; take prompts of as many tokens",
                PARAM,
            )
        mean -= other
    return mean[None].astype(np.float32)


def _given(values: object, axes: int) -> Rows:
    """Values of a body: as it gives them, or, where it gives one position's, (1, ...)."""
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=np.float32)
    except ValueError as error:
        raise InvalidRequest("values are lists of different lengths", PARAM) from error
    if not np.isfinite(array).all():
        raise InvalidRequest("values must be within float32, up to 3.4e38", PARAM)
    return array[None] if array.ndim <= axes else array


def _covered(change: _Change, values: Rows | None, length: int) -> tuple[int, ...] | Span:
    """The positions that are changed. Values for several positions are for those of the prompt."""
    positions = change.positions
    if values is None or len(values) == 1 or positions not in ("all", "prompt"):
        return positions
    if len(values) != length:
        raise InvalidRequest(
            f"there are values for {len(values)} positions, and the prompt has {length} tokens; "
            "name as many positions",
            PARAM,
        )
    return tuple(range(length))
