"""Interventions: turn the fields of a body into interventions of the engine.

A name with `*` becomes one intervention per layer. Negative indices count from the end. `from` and
`minus` become values that the stage has in other prompts (`readings.py`). Each intervention keeps
the name of its field for later error messages. The engine checks whether an intervention fits the
model (`model/inference/interventions.py`).
"""

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from logitd.model.inference.engine.requests import Activations
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import (
    PARAM,
    Operation,
    Span,
    Target,
    about,
    resolve_target,
    resolve_units,
)
from logitd.model.inference.interventions import Intervention as EngineIntervention
from logitd.model.operations.body import (
    Places,
    PositionChoice,
    PositionRange,
    RequestBody,
    Text,
    TokenIds,
)
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Compute, Subject
from logitd.model.operations.prompts import encode_all, resolve_positions
from logitd.model.operations.readings import (
    Ids,
    Mean,
    Reading,
    Readings,
    Values,
    compute_readings,
)
from logitd.model.plural import pluralize
from logitd.model.transformer.config import ModelConfig
from logitd.model.transformer.stages import Stage

MAX_RESOLVED = 2**13
"""Maximum number of interventions of a request, counted per prompt and layer. Every step of the
engine applies all of them."""
MAX_INTERVENTIONS = 256

StageName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=100,
        description="A name from GET /stages, or TransformerLens' name of the stage; * means every "
        "layer.",
    ),
]
TAKES: Mapping[str, Sequence[str]] = {
    "zero": (),
    "scale": ("factor",),
    "add": ("factor", "values", "from", "minus", "proportional_to"),
    "set": ("values", "from"),
    "clamp": ("minimum", "maximum"),
}
"""Fields that each operation accepts."""
Bound = Annotated[float, Field(ge=-1e30, le=1e30)]
Row = Annotated[list[float], Field(min_length=1, fail_fast=True)]
Rows = Annotated[list[Row], Field(min_length=1, fail_fast=True)]
RowsOfHeads = Annotated[list[Rows], Field(min_length=1, fail_fast=True)]


class Source(RequestBody):
    """Another prompt, computed as part of the request. The intervention uses the values that its
    stage has in this prompt."""

    prompt: Text | TokenIds
    positions: PositionChoice | None = Field(
        None, description="Absent: the positions of the intervention, or all if it names none."
    )


class Difference(RequestBody):
    """The mean of the stage over the positions of a prompt, minus its mean in another prompt."""

    model_config = ConfigDict(validate_by_name=False, serialize_by_alias=True)

    source: Source = Field(alias="from")
    minus: Source | None = None


DirectionChoice = Row | Rows | Difference


class Intervention(RequestBody):
    """A change to one stage at some positions: to some of its heads and units, or along a
    direction."""

    alternatives = (("units", "along"),)
    model_config = ConfigDict(validate_by_name=False, serialize_by_alias=True)

    stage: StageName
    operation: Operation
    positions: Literal["all", "prompt", "generated", "last"] | Places | PositionRange = Field(
        "all",
        description="'all'; 'prompt' or 'generated': only the tokens of the prompt or the "
        "generated ones; 'last': the last token of the prompt; or chosen positions of the prompt.",
    )
    heads: Places | None = Field(None, description="Heads, from 0. Absent: all.")
    units: Places | None = Field(
        None,
        description="Neurons or columns: indices of the stage's last axis, from 0. Absent: all. "
        "The units of attention scores and weights are keys.",
    )
    along: DirectionChoice | None = Field(
        None,
        description="A direction: change only the stage's coordinate along it, and nothing "
        "orthogonal to it. One list of numbers or one for each head (their norm has no effect), or "
        "the difference of two prompts.",
    )
    factor: Bound | None = Field(
        None,
        description="With scale: the factor. With add: a factor for the added values (absent: 1).",
    )
    values: Row | Rows | RowsOfHeads | None = Field(
        None,
        description="With add and set: values of the stage, either once for all positions or one "
        "list for each position. They have only the chosen heads and units; with `along`, each is "
        "a single number.",
    )
    source: Source | None = Field(
        None,
        alias="from",
        description="Instead of values: another prompt. set copies its values position by "
        "position, add adds their mean over the positions.",
    )
    minus: Source | None = Field(
        None, description="With add and from: a prompt whose mean is subtracted (steering)."
    )
    proportional_to: DirectionChoice | None = Field(
        None,
        description="With add: multiply what is added by the stage's coordinate along this "
        "direction.",
    )
    minimum: Bound | None = Field(None, description="With clamp: the lower limit.")
    maximum: Bound | None = Field(None, description="With clamp: the upper limit.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        taken = {name for names in TAKES.values() for name in names}
        given = {
            name: getattr(self, "source" if name == "from" else name) is not None for name in taken
        }
        for name in sorted(taken):
            if given[name] and name not in TAKES[self.operation]:
                raise ValueError(f"{self.operation!r} takes no {name}; leave it out")
        if self.operation == "scale" and not given["factor"]:
            raise ValueError("'scale' needs a factor")
        if self.operation in ("add", "set") and given["values"] == given["from"]:
            raise ValueError(f"{self.operation!r} needs exactly one of 'values' and 'from'")
        if self.operation == "clamp":
            _check_bounds(self.minimum, self.maximum)
        if given["minus"] and not given["from"]:
            raise ValueError("'minus' is subtracted from the mean of 'from': set 'from' as well")
        return self


def _check_bounds(minimum: float | None, maximum: float | None) -> None:
    if minimum is None and maximum is None:
        raise ValueError("'clamp' needs minimum, maximum or both")
    if minimum is not None and maximum is not None and minimum > maximum:
        raise ValueError(f"minimum ({minimum}) is above maximum ({maximum})")


Interventions = Annotated[
    list[Intervention],
    Field(
        max_length=MAX_INTERVENTIONS,
        fail_fast=True,
        description="Changes inside the forward pass, applied in this order. A prompt with "
        "interventions is computed by slower code, and shares no prefix with other prompts.",
    ),
]

# From fields to interventions of the engine

Positions = tuple[int, ...] | Span


@dataclass(frozen=True, slots=True)
class _Change:
    """An intervention from a body, for all prompts.

    field       the name of its field in the body
    positions   its positions in each prompt
    units       its units, keyed by the size of the stage's last axis
    values      the values, or the prompts from which they are taken
    directions  the directions, keyed by the names of their fields
    """

    field: str
    body: Intervention
    target: Target
    positions: Sequence[Positions]
    units: Mapping[int, tuple[int, ...]]
    values: Values | Mean | None
    directions: Mapping[str, Values | Mean]

    @property
    def readings(self) -> Iterator[Reading]:
        for each in (self.values, *self.directions.values()):
            if isinstance(each, Mean):
                yield from each.readings


Resolving = Generator[Compute, Computed, list[tuple[EngineIntervention, ...]]]


def resolve_interventions(
    bodies: Sequence[Intervention],
    prompts: Sequence[Ids],
    subject: Subject,
    *,
    generates: bool = False,
    field: str = f"{PARAM}[{{}}]",
) -> Resolving:
    """The interventions of each prompt. `generates` is True if tokens are generated after the
    prompts. `field` is a format string that turns an index of `bodies` into the field's name.
    Raises InvalidRequest for stages, heads and positions that do not exist."""
    lengths = [len(prompt) for prompt in prompts]
    named = {field.format(index): body for index, body in enumerate(bodies)}
    targets = {}
    for place, body in named.items():
        with about(place):
            targets[place] = resolve_target(body.stage, body.heads, subject.config)
    count = len(prompts) * sum(len(target.stages) for target in targets.values())
    if count > MAX_RESOLVED:
        raise InvalidRequest(
            f"there would be {count} interventions, one for each prompt and each chosen layer, "
            f"but the limit is {MAX_RESOLVED}. Send fewer prompts at once",
            PARAM,
        )
    changes = [
        _change(place, body, targets[place], lengths, subject, generates=generates)
        for place, body in named.items()
    ]
    fields: dict[Reading, str] = {}
    for change in changes:
        for reading in change.readings:
            fields.setdefault(reading, change.field)
    readings = yield from compute_readings(fields, subject)
    return [
        tuple(
            _intervention(change, stage, index, length, readings, subject.config)
            for change in changes
            for stage in change.target.stages
        )
        for index, length in enumerate(lengths)
    ]


def _change(
    field: str,
    body: Intervention,
    target: Target,
    lengths: Sequence[int],
    subject: Subject,
    *,
    generates: bool,
) -> _Change:
    with about(field):
        if body.positions == "generated" and not generates:
            raise InvalidRequest("positions is 'generated', but this request generates no tokens")
        positions = [_positions(body.positions, length) for length in lengths]
        units: dict[int, tuple[int, ...]] = {}
        for stage, length in itertools.product(target.stages, set(lengths) if body.units else ()):
            width = stage.shape(subject.config, length)[-1]
            if width not in units:
                units[width] = resolve_units(body.units or (), stage, width)
        values: Values | Mean | None = None
        if body.values is not None:
            values = as_array(body.values)
        elif body.source is not None:
            values = _mean(body, body.source, body.minus, target, subject)
        directions: dict[str, Values | Mean] = {}
        for name in ("along", "proportional_to"):
            match getattr(body, name):
                case Difference(source=source, minus=minus):
                    directions[name] = _mean(body, source, minus, target, subject)
                case list(numbers):
                    directions[name] = as_array(numbers, name)
    return _Change(field, body, target, positions, units, values, directions)


def _mean(
    body: Intervention, source: Source, minus: Source | None, target: Target, subject: Subject
) -> Mean:
    read = partial(_reading, body=body, target=target, subject=subject)
    return Mean(read(source), None if minus is None else read(minus))


def _reading(source: Source, *, body: Intervention, target: Target, subject: Subject) -> Reading:
    (token_ids,) = encode_all([source.prompt], PARAM, subject)
    positions = _positions(source.positions or body.positions, len(token_ids))
    if isinstance(positions, str):
        positions = tuple(range(len(token_ids)))
    names = tuple(stage.name for stage in target.stages)
    return Reading(token_ids, positions, Activations(stages=names, heads=target.heads))


def _positions(positions: Any, length: int) -> Positions:
    if positions in ("all", "prompt", "generated"):
        span: Span = positions
        return span
    return resolve_positions(positions, length)


def _intervention(
    change: _Change, stage: Stage, index: int, length: int, readings: Readings, config: ModelConfig
) -> EngineIntervention:
    body, positions, shape = change.body, change.positions[index], stage.shape(config, length)
    with about(change.field):
        units = change.units.get(shape[-1])
        directions = {
            name: each.of(stage, readings) if isinstance(each, Mean) else each
            for name, each in change.directions.items()
        }
        values = change.values
        if isinstance(values, Mean):
            values = _read_values(values, body, stage, readings, units, directions.get("along"))
        elif values is not None and values.ndim <= len(shape):
            values = values[None]
        if values is not None and len(values) > 1 and positions in ("all", "prompt"):
            if len(values) != length:
                raise InvalidRequest(
                    f"there are values for {pluralize(len(values), 'position')}, but the prompt "
                    f"has {length}: give values for {length}, or choose {len(values)} positions"
                )
            positions = tuple(range(length))
    return EngineIntervention(
        stage=stage.name,
        operation=body.operation,
        positions=positions,
        heads=change.target.heads,
        units=units,
        factor=1.0 if body.factor is None else body.factor,
        values=values,
        minimum=body.minimum,
        maximum=body.maximum,
        field=change.field,
        **directions,
    )


def _read_values(
    mean: Mean,
    body: Intervention,
    stage: Stage,
    readings: Readings,
    units: tuple[int, ...] | None,
    along: Values | None,
) -> Values:
    """The values that the stage has in other prompts, at the chosen units or along a direction. The
    shape is (positions, ...) for the operation "set". For other operations it is (1, ...):
    the mean over the positions, minus the mean of the prompt in `minus`, if there is one."""
    values = (
        mean.rows(stage, readings) if body.operation == "set" else mean.of(stage, readings)[None]
    )
    if along is not None and along.shape in (values.shape[1:], values.shape[-1:]):
        unit = along.astype(np.float64)
        with np.errstate(invalid="ignore"):  # the engine refuses a direction of length 0
            unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
            return (values * unit).sum(axis=-1, keepdims=True).astype(np.float32)
    if units is not None and units[-1] < values.shape[-1]:
        return values[..., units]
    return values


def as_array(values: object, field: str = "values") -> Values:
    """Convert nested lists to an array. Raises InvalidRequest if lists at the same level
    differ in length, or if a number is too large for float32."""
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=np.float32)
    except ValueError as error:
        raise InvalidRequest(f"the lists in {field} have different lengths") from error
    if not np.isfinite(array).all():
        raise InvalidRequest(f"a number in {field} is too large for float32 (above 3.4e38)")
    return array
