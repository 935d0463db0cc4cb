"""Interventions: from those of a body to those that the engine carries out.

Names with `*` become one intervention for each layer, negative indices count from the end, and
`from` and `minus` become values: what another prompt has at the stage (`readings.py`). Each keeps
the name of its field, by which it is refused if it does not fit the model: that is checked with the
request that it belongs to, when this is submitted (`model/inference/interventions.py`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import Request

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import (
    PARAM,
    Intervention,
    Span,
    Target,
    about,
    resolve_target,
)
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import Stage
from logitd.service.api.requests.encode import encode_all
from logitd.service.api.requests.positions import resolve_positions
from logitd.service.api.requests.readings import Reading, Readings, Rows, compute_readings
from logitd.service.core.models import Served
from logitd.service.schemas import interventions as schemas

MAX_CARRIED_OUT = 2**13
"""Interventions of a request once there is one for each layer that it names and each prompt. Every
step carries them out, and each is looked at several times before."""

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """An intervention of a body, and what of it is the same for each prompt.

    field   its place in the body
    source  the token ids of `from`; minus: those of `minus`
    """

    field: str
    body: schemas.Intervention
    target: Target
    source: TokenIds | None
    minus: TokenIds | None


@dataclass(frozen=True, slots=True)
class _Change:
    """An intervention of a body on one of its prompts, with what it reads."""

    asked: _Asked
    positions: tuple[int, ...] | Span
    source: Reading | None
    minus: Reading | None


async def resolve_interventions(
    bodies: Sequence[schemas.Intervention],
    prompts: Sequence[TokenIds],
    served: Served,
    request: Request,
    *,
    deadline: float | None,
    generates: bool = False,
) -> list[tuple[Intervention, ...]]:
    """The interventions on each prompt. `generates` says whether anything follows the prompts.
    Raises InvalidRequest for those that name what is not there."""
    if not bodies:
        return [()] * len(prompts)
    fields = {f"{PARAM}[{index}]": body for index, body in enumerate(bodies)}
    asked = [await _asked(field, body, served) for field, body in fields.items()]
    return await _resolve(asked, prompts, served, request, deadline, generates=generates)


async def resolve_varied(
    body: schemas.Intervention,
    prompt: TokenIds,
    served: Served,
    request: Request,
    *,
    deadline: float | None,
) -> tuple[Intervention, ...]:
    """What a sweep varies, one for each layer that it is for; raises as `resolve_interventions`."""
    asked = [await _asked("vary", body, served)]
    (varied,) = await _resolve(asked, [prompt], served, request, deadline, generates=False)
    return varied


async def _asked(field: str, body: schemas.Intervention, served: Served) -> _Asked:
    source, minus = [
        None if of is None else (await encode_all([of.prompt], PARAM, served))[0]
        for of in (body.source, body.minus)
    ]
    with about(field):
        target = resolve_target(body.stage, body.heads, served.checkpoint.config)
    return _Asked(field, body, target, source, minus)


async def _resolve(
    asked: Sequence[_Asked],
    prompts: Sequence[TokenIds],
    served: Served,
    request: Request,
    deadline: float | None,
    *,
    generates: bool,
) -> list[tuple[Intervention, ...]]:
    if (count := len(prompts) * sum(len(each.target.stages) for each in asked)) > MAX_CARRIED_OUT:
        raise InvalidRequest(
            f"there would be {count} interventions, one for each layer that is named and each "
            f"prompt; {MAX_CARRIED_OUT} are allowed. Send fewer prompts at once",
            PARAM,
        )
    changes = []
    for prompt in prompts:
        await asyncio.sleep(0)  # hundreds on each of many prompts are not to hold up others
        changes.append([_change(each, len(prompt), generates=generates) for each in asked])
    readings = await compute_readings(_wanted(changes), served, request, deadline)
    resolved = []
    for prompt, of_prompt in zip(prompts, changes, strict=True):
        await asyncio.sleep(0)
        resolved.append(
            tuple(
                _intervention(change, stage, readings, served.checkpoint.config, len(prompt))
                for change in of_prompt
                for stage in change.asked.target.stages
            )
        )
    return resolved


def _change(asked: _Asked, length: int, *, generates: bool) -> _Change:
    """On a prompt of `length` tokens."""
    body = asked.body
    with about(asked.field):
        if body.positions == "generated" and not generates:
            raise InvalidRequest("positions are 'generated', and nothing is generated here")
        return _Change(
            asked,
            _positions(body.positions, length),
            _reading(asked, body.source, asked.source),
            _reading(asked, body.minus, asked.minus),
        )


def _positions(positions: object, length: int) -> tuple[int, ...] | Span:
    match positions:
        case "all" | "prompt" | "generated" as span:
            return span
        case chosen:
            return resolve_positions(chosen, length)  # type: ignore[arg-type]


def _reading(
    asked: _Asked, source: schemas.Source | None, token_ids: TokenIds | None
) -> Reading | None:
    """What a `from` or `minus` reads: the positions that it names, else the intervention's."""
    if source is None or token_ids is None:
        return None
    chosen = asked.body.positions if source.positions is None else source.positions
    positions = _positions(chosen, len(token_ids))
    if isinstance(positions, str):
        positions = tuple(range(len(token_ids)))
    names = tuple(stage.name for stage in asked.target.stages)
    return Reading(token_ids, positions, names, asked.target.heads)


def _wanted(changes: Sequence[Sequence[_Change]]) -> Mapping[Reading, str]:
    """Everything that is read, each with the first field that asks for it."""
    wanted: dict[Reading, str] = {}
    for of_prompt in changes:
        for change in of_prompt:
            for reading in (change.source, change.minus):
                if reading is not None:
                    wanted.setdefault(reading, change.asked.field)
    return wanted


def _intervention(
    change: _Change, stage: Stage, readings: Readings, config: GPTConfig, length: int
) -> Intervention:
    """The change of one stage, on a prompt of `length` tokens."""
    asked = change.asked
    with about(asked.field):
        values = _values(change, stage, readings, len(stage.shape(config, length)))
        positions = _covered(change.positions, values, length)
    return Intervention(
        stage=stage.name,
        operation=asked.body.operation,
        positions=positions,
        heads=asked.target.heads,
        factor=1.0 if asked.body.factor is None else asked.body.factor,
        values=values,
        field=asked.field,
    )


def _values(change: _Change, stage: Stage, readings: Readings, axes: int) -> Rows | None:
    """(1, ...) or (positions, ...), of the chosen heads; None where the operation needs none.
    `axes` are those of a position."""
    body = change.asked.body
    if body.values is not None:
        return _given(body.values, axes)
    if change.source is None:
        return None
    rows = readings[change.source][stage.name]
    if body.operation == "set":
        return rows
    mean = rows.mean(axis=0, dtype=np.float64)
    if change.minus is not None:
        other = readings[change.minus][stage.name].mean(axis=0, dtype=np.float64)
        if other.shape != mean.shape:
            raise InvalidRequest(
                f"{stage.name} has the shape {list(mean.shape)} in `from` and {list(other.shape)} "
                "in `minus`; take prompts of as many tokens"
            )
        mean -= other
    return mean[None].astype(np.float32)


def _given(values: object, axes: int) -> Rows:
    """Values of a body: as it gives them, or, where it gives one position's, (1, ...)."""
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=np.float32)
    except ValueError as error:
        raise InvalidRequest("values are lists of different lengths") from error
    if not np.isfinite(array).all():
        raise InvalidRequest("values must be within float32, up to 3.4e38")
    return array[None] if array.ndim <= axes else array


def _covered(
    positions: tuple[int, ...] | Span, values: Rows | None, length: int
) -> tuple[int, ...] | Span:
    """The positions that are changed. Values for several positions are for those of the prompt."""
    if values is None or len(values) == 1 or positions not in ("all", "prompt"):
        return positions
    if len(values) != length:
        raise InvalidRequest(
            f"there are values for {len(values)} positions, and the prompt has {length} tokens; "
            "name as many positions"
        )
    return tuple(range(length))
