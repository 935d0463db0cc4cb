"""Interventions: turn the fields of a body into interventions of the engine.

A name with `*` becomes one intervention per layer. Negative indices count from the end. `from` and
`minus` become the values that the stage has in another prompt. These values are computed first,
with the same weights, and only once if several interventions need them. Each intervention keeps the
name of its field for later errors. The engine checks whether an intervention fits the model
(`model/inference/interventions.py`).
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, model_validator

from logitd.model.inference.engine.cost import output_elements, split_activations
from logitd.model.inference.engine.requests import Activations, OutputsRequest
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import (
    PARAM,
    Span,
    Target,
    about,
    resolve_target,
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
from logitd.model.operations.operation import Compute, Subject, new_id
from logitd.model.operations.prompts import encode_all, resolve_positions
from logitd.model.plural import pluralize
from logitd.model.transformer.config import ModelConfig
from logitd.model.transformer.stages import Stage

MAX_RESOLVED = 2**13
"""Maximum number of interventions of a request, counted per prompt and layer: every step of the
engine carries all of them out."""
MAX_INTERVENTIONS = 256

StageName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=100,
        description="A name from GET /stages, ours or TransformerLens'; * means every layer.",
    ),
]
TAKES: Mapping[str, Sequence[str]] = {
    "zero": (),
    "scale": ("factor",),
    "add": ("factor", "values", "from", "minus"),
    "set": ("values", "from"),
}
"""Fields that each operation takes."""
Row = Annotated[list[float], Field(min_length=1, fail_fast=True)]
Rows = Annotated[list[Row], Field(min_length=1, fail_fast=True)]
RowsOfHeads = Annotated[list[Rows], Field(min_length=1, fail_fast=True)]


class Source(RequestBody):
    """Another prompt that supplies the values of the same stage. It is computed as part of the
    request."""

    prompt: Text | TokenIds
    positions: PositionChoice | None = Field(
        None, description="Absent: the positions of the intervention, or all if it names none."
    )


class Intervention(RequestBody):
    """A change of the values of one stage, at some positions and heads."""

    model_config = ConfigDict(validate_by_name=False, serialize_by_alias=True)

    stage: StageName
    operation: Literal["zero", "scale", "add", "set"]
    positions: Literal["all", "prompt", "generated", "last"] | Places | PositionRange = Field(
        "all",
        description="All positions, those of the prompt, those of generated tokens, the last one "
        "of the prompt, or chosen positions of the prompt.",
    )
    heads: Places | None = Field(None, description="Heads, from 0. Absent: all.")
    factor: float | None = Field(
        None,
        ge=-1e30,
        le=1e30,
        description="With scale: the factor. With add: a factor for the added values (absent: 1).",
    )
    values: Row | Rows | RowsOfHeads | None = Field(
        None,
        description="With add and set: values of the stage, either once for all positions or one "
        "list for each position.",
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = {
            "factor": self.factor is not None,
            "values": self.values is not None,
            "from": self.source is not None,
            "minus": self.minus is not None,
        }
        for name in given:
            if given[name] and name not in TAKES[self.operation]:
                raise ValueError(f"{self.operation!r} takes no {name}; leave it out")
        if self.operation == "scale" and not given["factor"]:
            raise ValueError("'scale' needs a factor")
        if self.operation in ("add", "set") and given["values"] == given["from"]:
            raise ValueError(f"{self.operation!r} needs either values or from")
        if given["minus"] and not given["from"]:
            raise ValueError("minus is subtracted from the mean of 'from': give from as well")
        return self


Interventions = Annotated[
    list[Intervention],
    Field(
        max_length=MAX_INTERVENTIONS,
        fail_fast=True,
        description="Changes inside the forward pass, carried out in this order. A prompt with "
        "interventions is computed by slower code, and shares no prefix with other prompts.",
    ),
]

# From fields to interventions of the engine

Values = npt.NDArray[np.float32]
"""Values of a stage: (positions, ...)."""
Ids = tuple[int, ...]
Positions = tuple[int, ...] | Span


@dataclass(frozen=True, slots=True)
class Reading:
    """The stages whose values are taken from another prompt, at some positions and heads."""

    token_ids: Ids
    positions: tuple[int, ...]
    stages: tuple[str, ...]
    heads: tuple[int, ...] | None


Readings = Mapping[Reading, Mapping[str, Values]]
"""The values of each reading, by stage."""


@dataclass(frozen=True, slots=True)
class _Change:
    """An intervention of a body, for all prompts.

    field          its place in the body
    positions      its positions in each prompt
    source, minus  the readings for `from` and `minus`
    """

    field: str
    body: Intervention
    target: Target
    positions: Sequence[Positions]
    source: Reading | None
    minus: Reading | None


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
    readings = yield from _read(changes, subject)
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
    sources = [
        None if source is None else encode_all([source.prompt], PARAM, subject)[0]
        for source in (body.source, body.minus)
    ]
    with about(field):
        if body.positions == "generated" and not generates:
            raise InvalidRequest("positions are 'generated', but nothing is generated here")
        positions = [_positions(body.positions, length) for length in lengths]
        source, minus = [
            None if ids is None else _reading(body, source, ids, target)
            for source, ids in zip((body.source, body.minus), sources, strict=True)
        ]
    return _Change(field, body, target, positions, source, minus)


def _reading(body: Intervention, source: Source | None, token_ids: Ids, target: Target) -> Reading:
    chosen = body.positions if source is None or source.positions is None else source.positions
    positions = _positions(chosen, len(token_ids))
    if isinstance(positions, str):
        positions = tuple(range(len(token_ids)))
    names = tuple(stage.name for stage in target.stages)
    return Reading(token_ids, positions, names, target.heads)


def _positions(positions: Any, length: int) -> Positions:
    if positions in ("all", "prompt", "generated"):
        span: Span = positions
        return span
    return resolve_positions(positions, length)


def _read(changes: Sequence[_Change], subject: Subject) -> Generator[Compute, Computed, Readings]:
    """Compute all readings of the changes. Raises InvalidRequest for a reading that the model
    cannot compute; the error names the field that asks for it."""
    fields: dict[Reading, str] = {}
    for change in changes:
        for reading in (change.source, change.minus):
            if reading is not None:
                fields.setdefault(reading, change.field)
    if not fields:
        return {}
    requests = {
        reading: OutputsRequest(
            request_id=new_id("reading"),
            token_ids=reading.token_ids,
            positions=reading.positions,
            output=Activations(stages=reading.stages, heads=reading.heads),
        )
        for reading in fields
    }
    elements = sum(output_elements(each, subject.config) for each in requests.values())
    if subject.max_elements is not None and elements > subject.max_elements:
        raise InvalidRequest(
            f"the values read from other prompts have {elements} elements, but the limit is "
            f"{subject.max_elements}. Read fewer prompts, stages, heads or positions, or raise "
            "--max-reply-elements",
            PARAM,
        )
    try:
        computed = yield Compute(list(requests.values()))
    except InvalidRequest as error:
        asking = {requests[reading].request_id: field for reading, field in fields.items()}
        if error.request_id is None:  # all readings together exceed the queue
            raise
        with about(asking[error.request_id]):
            raise InvalidRequest(f"the prompt of from or minus: {error}") from error
    return {
        reading: split_activations(
            np.stack(computed.rows[request.request_id]),  # (positions, elements)
            Activations(stages=reading.stages, heads=reading.heads),
            subject.config,
            len(reading.token_ids),
        )
        for reading, request in requests.items()
    }


def _intervention(
    change: _Change, stage: Stage, index: int, length: int, readings: Readings, config: ModelConfig
) -> EngineIntervention:
    body, positions = change.body, change.positions[index]
    with about(change.field):
        values = _values(change, stage, readings, axes=len(stage.shape(config, length)))
        if values is not None and len(values) > 1 and positions in ("all", "prompt"):
            if len(values) != length:
                raise InvalidRequest(
                    f"there are values for {pluralize(len(values), 'position')}, but the prompt "
                    f"has {length}: set positions to as many"
                )
            positions = tuple(range(length))
    return EngineIntervention(
        stage=stage.name,
        operation=body.operation,
        positions=positions,
        heads=change.target.heads,
        factor=1.0 if body.factor is None else body.factor,
        values=values,
        field=change.field,
    )


def _values(change: _Change, stage: Stage, readings: Readings, *, axes: int) -> Values | None:
    """The values of an intervention at the chosen heads, (1, ...) or (positions, ...), with `axes`
    axes after the first; None if the operation needs no values."""
    body = change.body
    if body.values is not None:
        return _given_values(body.values, axes)
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
                "in `minus`; give prompts with equally many tokens"
            )
        mean -= other
    return mean[None].astype(np.float32)


def _given_values(values: object, axes: int) -> Values:
    """The values in a body as an array (positions, ...), or (1, ...) if they are given once for all
    positions."""
    array = as_array(values)
    return array[None] if array.ndim <= axes else array


def as_array(values: object) -> Values:
    """Nested lists as an array. Raises InvalidRequest unless it is regular and finite."""
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=np.float32)
    except ValueError as error:
        raise InvalidRequest("values are lists of different lengths") from error
    if not np.isfinite(array).all():
        raise InvalidRequest("values have a number that is too large for float32 (3.4e38)")
    return array
