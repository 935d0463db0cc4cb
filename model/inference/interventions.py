"""Interventions: changes to a stage at some positions, inside the forward pass.

An intervention names the part of the stage that changes (positions, heads, and units or the
coordinate along a direction) and the operation on this part.

The caller resolves the stage, the heads and the units (`resolve_target`, `resolve_units`) and
computes the values of an intervention (from another prompt, or as the difference of two prompts)
before it submits the request. `check_interventions` checks the shapes of the arrays;
`AppliedChange` (`model/inference/kernels/eager/change.py`) applies the interventions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.selection import resolve_heads, resolve_indices, resolve_stages
from logitd.model.plural import pluralize
from logitd.model.transformer.config import ModelConfig
from logitd.model.transformer.stages import Stage, match_stages

Operation = Literal["zero", "scale", "add", "set", "clamp"]
Span = Literal["all", "prompt", "generated"]

PARAM = "interventions"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intervention:
    """One change to a stage, in every pass that computes the stage.

    stage      name of a stage that may be changed
    positions  ascending positions of the prompt; or the name of a span: all positions, the
               positions of the prompt, or the generated ones
    heads      ascending heads; None: all, or the stage has no heads
    units      ascending indices of the stage's last axis; None: all
    along      a direction: only the stage's coordinate along it changes, that is, the dot product
               with the direction scaled to length 1. A NumPy array of float32 as long as
               the stage's last axis, or one such row for each of the chosen `heads`. None: the
               units change
    operation  zero; scale by `factor`; add `factor` times `values`; set to `values`; clamp between
               `minimum` and `maximum` (None: no limit)
    values     NumPy array of float32 (P, ...): P is 1 for the same values at every position, or
               len(positions); the rest is the stage's shape with only the chosen `heads` and
               `units`; with `along` the last axis has one number. An axis over keys (T) is as long
               as the prompt
    proportional_to
               with add: a direction as in `along`; the values are multiplied by the coordinate of
               the stage along it
    field      name of the intervention in messages; None: its index
    """

    stage: str
    operation: Operation
    positions: tuple[int, ...] | Span = "all"
    heads: tuple[int, ...] | None = None
    units: tuple[int, ...] | None = None
    along: Any = None
    factor: float = 1.0
    values: Any = None
    proportional_to: Any = None
    minimum: float | None = None
    maximum: float | None = None
    field: str | None = None

    @property
    def may_enlarge(self) -> bool:
        """False if the intervention only removes or shrinks values."""
        shrinks = self.operation == "scale" and abs(self.factor) <= 1
        return not (self.operation == "zero" or shrinks)

    @property
    def directions(self) -> dict[str, Any]:
        """The intervention's directions, by field name."""
        named = {"along": self.along, "proportional_to": self.proportional_to}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def elements(self) -> int:
        """Number of elements in all arrays of the intervention."""
        given = 0 if self.values is None else self.values.size
        return given + sum(direction.size for direction in self.directions.values())


@dataclass(frozen=True, slots=True)
class Target:
    """The stages to change, and the heads to change in each (None: all heads, if the stages have
    heads)."""

    stages: tuple[Stage, ...]
    heads: tuple[int, ...] | None


def resolve_target(pattern: str, heads: Sequence[int] | None, config: ModelConfig) -> Target:
    """The stages that match a name or pattern, with the given heads; negative heads count from the
    end. Raises InvalidRequest for stages and heads that do not exist or may not be changed."""
    stages = resolve_stages([pattern], config, PARAM)
    for stage in stages:
        if not stage.kind.changes:
            instead = (
                "logit_bias (of /probs and /logits: in processing)"
                if stage.name == "logits"
                else "attention.heads"
            )
            raise InvalidRequest(f"{stage.name} cannot be changed; use {instead}", PARAM)
    return Target(stages, None if heads is None else resolve_heads(heads, stages, config))


def check_interventions(
    interventions: Sequence[Intervention], config: ModelConfig, prompt_length: int
) -> None:
    """Raise InvalidRequest if an intervention cannot be applied to a prompt of this length."""
    for index, intervention in enumerate(interventions):
        with about(intervention.field or f"{PARAM}[{index}]"):
            _check_intervention(intervention, config, prompt_length)


@contextmanager
def about(field: str) -> Iterator[None]:
    """Prefix the message of an InvalidRequest with the intervention's name, as in
    `interventions[3]: ...`."""
    try:
        yield
    except InvalidRequest as error:
        param = field.partition("[")[0]
        raise InvalidRequest(f"{field}: {error}", param, error.code) from error


def resolve_units(units: Sequence[int], stage: Stage, width: int) -> tuple[int, ...]:
    """Resolve indices of a stage's last axis, which has `width` units."""
    return resolve_indices("units", units, width, f"{stage.name} has {pluralize(width, 'unit')}")


def _check_intervention(intervention: Intervention, config: ModelConfig, length: int) -> None:
    heads, units = intervention.heads, intervention.units
    (stage,) = match_stages([intervention.stage], config)
    shape = stage.shape(config, length)
    if heads is not None:
        if stage.heads_axis is None:
            raise InvalidRequest(f"{stage.name} has no heads: remove heads")
        shape = (len(heads), *shape[1:])
    for name, direction in intervention.directions.items():
        _check_direction(name, direction, stage, shape)
    if units is not None:
        shape = (*shape[:-1], len(units))
    if intervention.along is not None:
        shape = (*shape[:-1], 1)
    if intervention.operation in ("add", "set"):
        _check_values(intervention, shape)


def _check_direction(name: str, direction: Any, stage: Stage, shape: tuple[int, ...]) -> None:
    """Check a direction. `shape` is the shape of the chosen heads of its stage at one position."""
    if stage.kind.axes[-1] == "T":
        raise InvalidRequest(
            f"{name} cannot be used with {stage.name}, whose last axis is over keys: list keys in "
            "units instead"
        )
    if direction.shape not in (shape, shape[-1:]):
        raise InvalidRequest(
            f"{name} has the shape {list(direction.shape)}, but {stage.name} needs "
            + " or ".join(str([*each]) for each in dict.fromkeys((shape[-1:], shape)))
        )
    if not direction.any(axis=-1).all():
        raise InvalidRequest(f"{name} has a norm of 0; a direction needs a nonzero norm")


def _check_values(intervention: Intervention, shape: tuple[int, ...]) -> None:
    """Check the values of an intervention. `shape` is the shape of the chosen part of its stage at
    one position."""
    values, positions = intervention.values, intervention.positions
    rows = {1} if isinstance(positions, str) else {1, len(positions)}
    if values.shape[0] not in rows or values.shape[1:] != shape:
        shapes = " or ".join(str([count, *shape]) for count in sorted(rows, reverse=True))
        raise InvalidRequest(
            f"values have the shape {list(values.shape)}, but {intervention.stage} needs "
            f"{shapes}; the first axis is over positions"
        )
