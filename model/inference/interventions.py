"""Interventions: what is changed inside a forward, at which stage and positions.

Plain data, checked against the model's shape by `check_interventions`; carried out by
`model/inference/kernels/eager/taps.py`. Not here: where values come from (another prompt, a
difference of two), which is the caller's business and settled before a request is queued.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.selection import resolve_heads
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import Stage, UnknownStage, match_stages

Operation = Literal["zero", "scale", "add", "set"]
Span = Literal["all", "prompt", "generated"]

PARAM = "interventions"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intervention:
    """One change of a stage, carried out wherever the stage is computed.

    stage      its name; one of those that may be changed
    positions  ascending positions of the prompt, or a span of all that is computed
    heads      ascending; None: all, or the stage has none
    operation  zero; scale: times `factor`; add: `factor` times `values` are added; set: `values`
    values     NumPy, float32: (1, ...) for every position alike, or (len(positions), ...), and
               after that the stage's shape, of the chosen `heads` alone. A last axis T is as long
               as the prompt
    field      of the caller's, that it is made of: what messages call it. None: its place among
               those of the request
    """

    stage: str
    operation: Operation
    positions: tuple[int, ...] | Span = "all"
    heads: tuple[int, ...] | None = None
    factor: float = 1.0
    values: Any = None
    field: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What is changed: stages, and of each the same heads; None: all, or there are none."""

    stages: tuple[Stage, ...]
    heads: tuple[int, ...] | None


def resolve_target(pattern: str, heads: Sequence[int] | None, config: GPTConfig) -> Target:
    """The stages of a name or pattern, and heads, of which negative ones count from the end.
    Raises InvalidRequest for what is not there, or may not be changed."""
    stages = changeable_stages(pattern, config)
    return Target(stages, None if heads is None else resolve_heads(heads, stages, config))


def changeable_stages(pattern: str, config: GPTConfig) -> tuple[Stage, ...]:
    """The stages of a name or pattern. Raises InvalidRequest where there is none, or one that may
    not be changed."""
    try:
        stages = match_stages([pattern], config)
    except UnknownStage as error:
        raise InvalidRequest(str(error), PARAM) from error
    for stage in stages:
        if not stage.kind.changes:
            instead = "logit_bias" if stage.name == "logits" else "attention.heads"
            raise InvalidRequest(f"{stage.name} cannot be changed; use {instead}", PARAM)
    return stages


def changeable_stage(name: str, config: GPTConfig) -> Stage:
    """The one stage of a name. Raises InvalidRequest as `changeable_stages` does, and for a pattern
    that matches several."""
    stages = changeable_stages(name, config)
    if len(stages) > 1:
        raise InvalidRequest(f"{name!r} matches {len(stages)} stages; name one", PARAM)
    return stages[0]


def check_interventions(
    interventions: Sequence[Intervention], config: GPTConfig, prompt_length: int
) -> None:
    """Raise InvalidRequest for what cannot be carried out on a prompt of so many tokens."""
    for index, intervention in enumerate(interventions):
        with about(intervention.field or f"{PARAM}[{index}]"):
            _check_intervention(intervention, config, prompt_length)


@contextmanager
def about(field: str) -> Iterator[None]:
    """Let an InvalidRequest say which intervention it is about: `interventions[3]: ...`."""
    try:
        yield
    except InvalidRequest as error:
        param = field.partition("[")[0]
        raise InvalidRequest(f"{field}: {error}", param) from error


def _check_intervention(intervention: Intervention, config: GPTConfig, length: int) -> None:
    stage = changeable_stage(intervention.stage, config)
    _check_positions(intervention.positions, length)
    shape = stage.shape(config, length)
    heads, axis = intervention.heads, stage.heads_axis
    if heads is not None:
        if axis is None:
            raise InvalidRequest(f"heads are given, and {stage.name} has none")
        count = shape[0]
        if not heads or list(heads) != sorted(set(heads)) or not 0 <= heads[0] <= heads[-1] < count:
            raise InvalidRequest(
                f"heads {list(heads[:20])} must be ascending, distinct and within 0 to {count - 1} "
                f"({axis} of {stage.name})"
            )
        shape = (len(heads), *shape[1:])
    if intervention.operation in ("add", "set"):
        _check_values(intervention, shape)


def _check_positions(positions: tuple[int, ...] | Span, length: int) -> None:
    if isinstance(positions, str):
        return
    for position in positions:
        if not 0 <= position < length:
            raise InvalidRequest(
                f"position {position} is not one of the prompt's {length} (0 to {length - 1})"
            )
    if not positions or list(positions) != sorted(set(positions)):
        raise InvalidRequest(
            f"positions {list(positions[:20])} must be ascending, distinct and at least one"
        )


def _check_values(intervention: Intervention, shape: tuple[int, ...]) -> None:
    """`shape` is that of the chosen part of the stage at one position."""
    values, positions = intervention.values, intervention.positions
    rows = {1} if isinstance(positions, str) else {1, len(positions)}
    if values is None:
        raise InvalidRequest(f"{intervention.operation!r} needs values")
    if values.shape[0] not in rows or values.shape[1:] != shape:
        each = f"{max(rows)} or 1" if max(rows) > 1 else "1"
        raise InvalidRequest(
            f"values have the shape {list(values.shape)}; {intervention.stage} takes "
            f"{list(shape)} at each of {each} positions"
        )
