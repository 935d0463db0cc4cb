"""Sweep: divides an intervention into the cells of a grid over layers, heads and positions, and
compares the cells by a metric of a row of logits.

Ablating each head in turn, or patching each layer at each position, means applying the same
intervention in each place in turn. The caller turns each cell into a request.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention, check_interventions
from logitd.model.inference.sampling.distribution import log_softmax
from logitd.model.transformer.config import ModelConfig
from logitd.model.transformer.stages import Stage, match_stages

Axis = Literal["layers", "heads", "positions"]
Metric = Literal["logit", "probability", "loss", "kl"]
TOKENS: Mapping[Metric, Sequence[str]] = {
    "logit": ("token", "minus"),
    "probability": ("token", "minus"),
    "loss": ("token",),
    "kl": (),
}
"""For each metric, the request fields of the tokens that it uses."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the grid. A coordinate is None if its axis is not swept."""

    layer: int | None
    head: int | None
    position: int | None


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid over some axes.

    axes    the layers, heads or positions along each axis, in the requested order
    varied  the interventions by layer; the key None has the interventions of all layers, which are
            used if layers are not swept
    """

    axes: Mapping[Axis, tuple[int, ...]]
    varied: Mapping[int | None, Sequence[Intervention]]

    @property
    def count(self) -> int:
        return math.prod(map(len, self.axes.values()))

    def cells(self) -> Iterator[tuple[Cell, tuple[Intervention, ...]]]:
        """The cells with their interventions; the last axis changes fastest. They are created
        lazily, because creating all of them may take seconds."""
        for place in itertools.product(*self.axes.values()):
            at = dict(zip(self.axes, place, strict=True))
            cell = Cell(at.get("layers"), at.get("heads"), at.get("positions"))
            yield cell, tuple(_at(change, cell) for change in self.varied[cell.layer])


def make_grid(
    varied: Sequence[Intervention], over: Sequence[Axis], prompt_length: int, config: ModelConfig
) -> Grid:
    """The grid of an intervention over some axes. `varied` has a copy of the intervention for each
    layer. If an axis is not swept, every cell changes all layers, heads or positions that the
    intervention selects. Raises InvalidRequest if an intervention cannot be applied, or if its
    stage lacks a swept axis."""
    check_interventions(varied, config, prompt_length)
    stages = [match_stages([change.stage], config)[0] for change in varied]
    axes = {axis: _places(axis, varied[0], stages, prompt_length, config) for axis in over}
    by_layer: defaultdict[int | None, list[Intervention]] = defaultdict(list)
    for stage, intervention in zip(stages, varied, strict=True):
        by_layer[stage.layer].append(intervention)
    by_layer[None] = list(varied)
    return Grid(axes, by_layer)


def _places(
    axis: Axis,
    first: Intervention,
    stages: Sequence[Stage],
    prompt_length: int,
    config: ModelConfig,
) -> tuple[int, ...]:
    """The layers, heads or positions along an axis. `first` is the intervention at the first of
    `stages`; the interventions at the other stages are otherwise equal to it."""
    match axis:
        case "layers":
            if stages[0].layer is None:
                raise InvalidRequest(f"{stages[0].name} has no layers to sweep over", "over")
            layers = tuple(stage.layer for stage in stages if stage.layer is not None)
            if len(set(layers)) < len(layers):
                raise InvalidRequest(
                    f"{first.stage} matches several stages of a layer, but a sweep over layers "
                    "needs one of each layer: name a single stage, such as blocks.*.output",
                    "over",
                )
            return layers
        case "heads":
            if stages[0].heads_axis is None:
                raise InvalidRequest(f"{stages[0].name} has no heads to sweep over", "over")
            count = getattr(config, stages[0].heads_axis)
            return tuple(range(count)) if first.heads is None else first.heads
        case "positions":
            places = first.positions
            return tuple(range(prompt_length)) if isinstance(places, str) else places


def _at(intervention: Intervention, cell: Cell) -> Intervention:
    values, heads, positions = intervention.values, intervention.heads, intervention.positions
    directions = intervention.directions
    if cell.head is not None:
        index = cell.head if heads is None else heads.index(cell.head)
        if values is not None:  # (1 or positions, heads, ...)
            values = values[:, index : index + 1]
        for name, direction in directions.items():
            if direction.ndim > 1:  # (heads, width)
                directions[name] = direction[index : index + 1]
        heads = (cell.head,)
    if cell.position is not None:
        if values is not None and len(values) > 1:
            assert not isinstance(positions, str)
            index = positions.index(cell.position)
            values = values[index : index + 1]
        positions = (cell.position,)
    changed = {"values": values, "heads": heads, "positions": positions, **directions}
    return replace(intervention, **changed)


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric with its tokens.

    metric     logit        logit of `token`, minus the logit of `minus` if given
               probability  the same with probabilities
               loss         minus the logprob of `token`, in nats
               kl           Kullback-Leibler divergence in nats: the sum of p log(p / q), with p
                            from `unchanged` and q from the row
    unchanged  logprobs (V,); None: the logprobs of the row itself
    """

    metric: Metric
    token: int | None = None
    minus: int | None = None
    unchanged: Any = None

    @property
    def columns(self) -> tuple[int, ...] | None:
        """The ids whose logits are needed; None: all."""
        if self.metric != "logit":
            return None
        return tuple(each for each in (self.token, self.minus) if each is not None)

    def of(self, logits: Any) -> float:
        """The metric of a row of logits (V,), or of only the logits of `columns`."""
        if self.metric == "logit":
            value, *minus = map(float, logits)
            return value - sum(minus)
        logprobs = log_softmax(logits)
        if self.metric == "kl":
            before = logprobs if self.unchanged is None else self.unchanged
            return float((np.exp(before) * (before - logprobs)).sum())
        if self.metric == "loss":
            return -float(logprobs[self.token])
        minus_prob = 0.0 if self.minus is None else float(np.exp(logprobs[self.minus]))
        return float(np.exp(logprobs[self.token])) - minus_prob
