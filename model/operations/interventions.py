"""Interventions: changes inside the forward, from the fields of a body to engine interventions.

Names with `*` become one intervention per layer, negative indices count from the end, and `from`
and `minus` become values: what another prompt has at the stage (a reading). Readings are computed
first, by the same weights; equal ones once. Each intervention keeps the name of its field, which
later errors name. Whether it fits the model is checked with the request that it belongs to
(`model/inference/interventions.py`).
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

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
    Examples,
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
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import Stage

MAX_RESOLVED = 2**13
"""Interventions of a request, counted per prompt and layer. Every step carries them out, and each
is checked several times before."""
MAX_INTERVENTIONS = 256

StageName = Annotated[
    str, Field(min_length=1, max_length=100, description="A name of GET /stages; * is any layer.")
]
Row = Annotated[list[float], Field(min_length=1, fail_fast=True)]
Rows = Annotated[list[Row], Field(min_length=1, fail_fast=True)]
RowsOfHeads = Annotated[list[Rows], Field(min_length=1, fail_fast=True)]


class Source(RequestBody):
    """What another prompt has at the same stage, computed in the same request."""

    examples: ClassVar[Examples] = {}

    prompt: Text | TokenIds
    positions: PositionChoice | None = Field(
        None,
        description="Absent: those of the intervention, where it names any, and all otherwise.",
    )


class Intervention(RequestBody):
    """One change of a stage, at some positions and heads."""

    examples: ClassVar[Examples] = {}
    model_config = ConfigDict(validate_by_name=False, serialize_by_alias=True)

    stage: StageName
    operation: Literal["zero", "scale", "add", "set"]
    positions: Literal["all", "prompt", "generated", "last"] | Places | PositionRange = Field(
        "all",
        description="All that is computed, the prompt, what is generated after it, or positions of "
        "the prompt.",
    )
    heads: Places | None = Field(None, description="From 0. Absent: all.")
    factor: float | None = Field(
        None, ge=-1e30, le=1e30, description="Of scale; of what add adds (absent: 1)."
    )
    values: Row | Rows | RowsOfHeads | None = Field(
        None,
        description="For add and set: the stage's values at one position, for all, or a list of "
        "them, for each position.",
    )
    source: Source | None = Field(
        None,
        alias="from",
        description="Instead of values: for set, position by position, what another prompt has; "
        "for add, the mean over its positions.",
    )
    minus: Source | None = Field(
        None, description="With add and from: a prompt whose mean is subtracted (steering)."
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Intervention":
        operation = self.operation
        given = [
            name
            for name, value in (
                ("factor", self.factor),
                ("values", self.values),
                ("from", self.source),
                ("minus", self.minus),
            )
            if value is not None
        ]
        takes = {
            "zero": (),
            "scale": ("factor",),
            "add": ("factor", "values", "from", "minus"),
            "set": ("values", "from"),
        }[operation]
        for name in given:
            if name not in takes:
                raise ValueError(f"{operation!r} takes no {name}; leave it out")
        if operation == "scale" and self.factor is None:
            raise ValueError("'scale' needs a factor")
        if operation in ("add", "set") and (self.values is None) == (self.source is None):
            raise ValueError(f"{operation!r} needs values or from, one of the two")
        if self.minus is not None and self.source is None:
            raise ValueError("minus is subtracted from what 'from' has; give from as well")
        return self


Interventions = Annotated[
    list[Intervention],
    Field(
        max_length=MAX_INTERVENTIONS,
        fail_fast=True,
        description="Changes inside the forward, carried out in this order. Such a prompt is "
        "computed by plain code beside the others, and shares no prefix with them.",
    ),
]

# From fields to engine interventions

Values = npt.NDArray[np.float32]
"""Values of a stage: (positions, ...)."""
Ids = tuple[int, ...]
Positions = tuple[int, ...] | Span


@dataclass(frozen=True, slots=True)
class Reading:
    """Stages to read of another prompt, at some positions and heads."""

    token_ids: Ids
    positions: tuple[int, ...]
    stages: tuple[str, ...]
    heads: tuple[int, ...] | None


Readings = Mapping[Reading, Mapping[str, Values]]
"""The values of each reading, by stage."""


@dataclass(frozen=True, slots=True)
class _Resolved:
    """An intervention of a body: what is the same for each prompt.

    field   its place in the body
    source  the token ids of `from`; minus: those of `minus`
    """

    field: str
    body: Intervention
    target: Target
    source: Ids | None
    minus: Ids | None


@dataclass(frozen=True, slots=True)
class _Change:
    """An intervention of a body on one of its prompts, with its readings."""

    resolved: _Resolved
    positions: Positions
    source: Reading | None
    minus: Reading | None


Resolving = Generator[Compute, Computed, list[tuple[EngineIntervention, ...]]]


def resolve_interventions(
    bodies: Sequence[Intervention],
    prompts: Sequence[Ids],
    subject: Subject,
    *,
    generates: bool = False,
) -> Resolving:
    """The interventions on each prompt. `generates` says whether tokens follow the prompts. Raises
    InvalidRequest for stages, heads and positions that do not exist."""
    if not bodies:
        return [()] * len(prompts)
    named = [_resolve(f"{PARAM}[{i}]", body, subject) for i, body in enumerate(bodies)]
    return (yield from _resolve_on(named, prompts, subject, generates=generates))


def resolve_varied(body: Intervention, prompt: Ids, subject: Subject) -> Resolving:
    """What a sweep varies, one intervention per layer, as the only item of a list."""
    named = [_resolve("vary", body, subject)]
    return (yield from _resolve_on(named, [prompt], subject, generates=False))


def _resolve(field: str, body: Intervention, subject: Subject) -> _Resolved:
    source, minus = [
        None if of is None else encode_all([of.prompt], PARAM, subject)[0]
        for of in (body.source, body.minus)
    ]
    with about(field):
        target = resolve_target(body.stage, body.heads, subject.config)
    return _Resolved(field, body, target, source, minus)


def _resolve_on(
    named: Sequence[_Resolved], prompts: Sequence[Ids], subject: Subject, *, generates: bool
) -> Resolving:
    count = len(prompts) * sum(len(each.target.stages) for each in named)
    if count > MAX_RESOLVED:
        raise InvalidRequest(
            f"there would be {count} interventions, one for each layer that is named and each "
            f"prompt; {MAX_RESOLVED} are allowed. Send fewer prompts at once",
            PARAM,
        )
    changes = [
        [_change(each, len(prompt), generates=generates) for each in named] for prompt in prompts
    ]
    readings = yield from _read(_wanted(changes), subject)
    return [
        tuple(
            _intervention(change, stage, readings, subject.config, len(prompt))
            for change in of_prompt
            for stage in change.resolved.target.stages
        )
        for prompt, of_prompt in zip(prompts, changes, strict=True)
    ]


def _change(resolved: _Resolved, length: int, *, generates: bool) -> _Change:
    """The change on a prompt of `length` tokens."""
    body = resolved.body
    with about(resolved.field):
        if body.positions == "generated" and not generates:
            raise InvalidRequest("positions are 'generated', and nothing is generated here")
        return _Change(
            resolved,
            _positions(body.positions, length),
            _reading(resolved, body.source, resolved.source),
            _reading(resolved, body.minus, resolved.minus),
        )


def _positions(positions: Any, length: int) -> Positions:
    if positions in ("all", "prompt", "generated"):
        span: Span = positions
        return span
    return resolve_positions(positions, length)


def _reading(resolved: _Resolved, source: Source | None, token_ids: Ids | None) -> Reading | None:
    """What `from` or `minus` reads: at its own positions, else at the intervention's."""
    if source is None or token_ids is None:
        return None
    chosen = resolved.body.positions if source.positions is None else source.positions
    positions = _positions(chosen, len(token_ids))
    if isinstance(positions, str):
        positions = tuple(range(len(token_ids)))
    names = tuple(stage.name for stage in resolved.target.stages)
    return Reading(token_ids, positions, names, resolved.target.heads)


def _wanted(changes: Sequence[Sequence[_Change]]) -> Mapping[Reading, str]:
    """All readings, each with the first field that asks for it."""
    wanted: dict[Reading, str] = {}
    for of_prompt in changes:
        for change in of_prompt:
            for reading in (change.source, change.minus):
                if reading is not None:
                    wanted.setdefault(reading, change.resolved.field)
    return wanted


def _read(
    wanted: Mapping[Reading, str], subject: Subject
) -> Generator[Compute, Computed, Readings]:
    """Compute readings. Raises InvalidRequest for those that the model cannot compute, with the
    field that asks for them."""
    if not wanted:
        return {}
    requests = {
        reading: OutputsRequest(
            request_id=new_id("reading"),
            token_ids=reading.token_ids,
            positions=reading.positions,
            output=Activations(stages=reading.stages, heads=reading.heads),
        )
        for reading in wanted
    }
    elements = sum(output_elements(each, subject.config) for each in requests.values())
    if subject.max_elements is not None and elements > subject.max_elements:
        raise InvalidRequest(
            f"what is read from other prompts has {elements} elements; {subject.max_elements} are "
            "allowed. Read fewer prompts, stages, heads or positions, or raise "
            "--max-reply-elements",
            PARAM,
        )
    try:
        computed = yield Compute(list(requests.values()))
    except InvalidRequest as error:
        if error.request_id is None:  # it is about all of them: more than the queue ever holds
            raise
        fields = {requests[reading].request_id: field for reading, field in wanted.items()}
        with about(fields[error.request_id]):
            raise InvalidRequest(f"what is read from another prompt: {error}") from error
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
    change: _Change, stage: Stage, readings: Readings, config: GPTConfig, length: int
) -> EngineIntervention:
    """The change of one stage, on a prompt of `length` tokens."""
    resolved = change.resolved
    with about(resolved.field):
        values = _values(change, stage, readings, len(stage.shape(config, length)))
        positions = _covered(change.positions, values, length)
    return EngineIntervention(
        stage=stage.name,
        operation=resolved.body.operation,
        positions=positions,
        heads=resolved.target.heads,
        factor=1.0 if resolved.body.factor is None else resolved.body.factor,
        values=values,
        field=resolved.field,
    )


def _values(change: _Change, stage: Stage, readings: Readings, axes: int) -> Values | None:
    """(1, ...) or (positions, ...), of the chosen heads; None if the operation needs none. `axes`
    are those of a position."""
    body = change.resolved.body
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


def _given(values: object, axes: int) -> Values:
    """Values of a body: (positions, ...), or (1, ...) if it gives those of one position."""
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=np.float32)
    except ValueError as error:
        raise InvalidRequest("values are lists of different lengths") from error
    if not np.isfinite(array).all():
        raise InvalidRequest("values must be within float32, up to 3.4e38")
    return array[None] if array.ndim <= axes else array


def _covered(positions: Positions, values: Values | None, length: int) -> Positions:
    """The positions that are changed. Values for several positions are for those of the prompt."""
    if values is None or len(values) == 1 or positions not in ("all", "prompt"):
        return positions
    if len(values) != length:
        raise InvalidRequest(
            f"there are values for {len(values)} positions, and the prompt has {length} tokens; "
            "name as many positions"
        )
    return tuple(range(length))
