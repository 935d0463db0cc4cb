"""AppliedChange: one intervention on the device, applied to the rows of a stage.

An intervention changes either some numbers of the stage (its chosen heads and units) or one
coordinate, which is the dot product of the stage with a direction of length 1. The operation on
these numbers is the same in both cases.

A row's bits do not depend on other rows: all operations are elementwise, and `_coordinate` adds
products in a fixed order, by halves. Coordinates are computed in float32 even if the model is in
bfloat16, and the changed stage is rounded once.

Shapes: R changed rows, W the stage's last axis, C chosen units of it (1 with a direction).
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.inference.interventions import Intervention

Axis = slice | Tensor
"""Indices along one axis. Consecutive indices are a slice, because indexing with a slice copies
nothing."""


class AppliedChange:
    """One intervention, with its arrays on the model's device."""

    def __init__(self, intervention: Intervention, like: Tensor) -> None:
        self._intervention = intervention
        exact = torch.promote_types(like.dtype, torch.float32)
        self._along = _direction(intervention.along, like.device, exact)
        self._measured = _direction(intervention.proportional_to, like.device, exact)
        self._values: Tensor | None = None
        if intervention.values is not None:
            dtype = like.dtype if self._along is None else exact
            self._values = torch.from_numpy(intervention.values).to(like.device, dtype)
        self._heads = None if intervention.heads is None else _axis(intervention.heads)
        self._units: Axis = slice(None)
        if intervention.units is not None:
            self._units = _axis(intervention.units)
        elif self._values is not None and self._along is None:
            self._units = slice(0, self._values.shape[-1])  # over keys there may be more

    def rows(self, positions: range, prompt_length: int) -> Sequence[int]:
        """The indices of the positions that the intervention changes."""
        count, generated = len(positions), max(0, prompt_length - positions.start)
        match self._intervention.positions:
            case "all":
                return range(count)
            case "prompt":
                return range(min(count, generated))
            case "generated":
                return range(generated, count)
            case listed:
                first, end = (bisect_left(listed, at) for at in (positions.start, positions.stop))
                return [position - positions.start for position in listed[first:end]]

    def apply(self, value: Tensor, positions: range, rows: Sequence[int]) -> None:
        """Apply the intervention to `rows` of `value` (positions, ..., W), in place."""
        index = self._index(value, rows)
        part = value[index]  # (R, ..., C), or (R, ..., W) with a direction
        if self._along is None:
            value[index] = self._changed(part, value, positions, rows)
        else:
            before = _coordinate(part, self._along)
            after = self._changed(before, value, positions, rows)
            value[index] = (part + (after - before) * self._along).to(value.dtype)

    def _changed(
        self, numbers: Tensor, value: Tensor, positions: range, rows: Sequence[int]
    ) -> Tensor:
        """The new values of `numbers` (R, ..., C)."""
        asked = self._intervention
        match asked.operation:
            case "zero":
                return torch.zeros_like(numbers)
            case "scale":
                return numbers * asked.factor
            case "clamp":
                # As tensors, because torch raises an error for numbers beyond float16's range.
                low, high = (
                    None if bound is None else numbers.new_tensor(bound)
                    for bound in (asked.minimum, asked.maximum)
                )
                return numbers.clamp(low, high)
            case "set":
                return self._values_of(positions, rows, numbers)
            case "add":
                added = asked.factor * self._values_of(positions, rows, numbers)
                if self._measured is not None:
                    whole = value[self._index(value, rows, units=False)]
                    added = added * _coordinate(whole, self._measured)
                return (numbers + added).to(numbers.dtype)

    def _values_of(self, positions: range, rows: Sequence[int], numbers: Tensor) -> Tensor:
        """The values for these rows: (1, ..., C) or (R, ..., C)."""
        values, listed = self._values, self._intervention.positions
        assert values is not None
        if len(values) > 1:
            assert not isinstance(listed, str)
            first = bisect_left(listed, positions.start)
            values = values[first : first + len(rows)]
        return values[..., : numbers.shape[-1]]

    def _index(self, value: Tensor, rows: Sequence[int], *, units: bool = True) -> tuple[Axis, ...]:
        """An index into `value` that selects rows, heads and, with `units`, units."""
        axes: list[Axis] = [slice(None)] * value.ndim
        axes[0] = _axis(rows)
        if self._heads is not None:
            axes[1] = self._heads
        if units:
            axes[-1] = self._units
            if isinstance(self._units, Tensor):  # over keys there may be fewer
                axes[-1] = self._units[self._units < value.shape[-1]]
        return _mesh(axes, value.shape)


def _direction(array: Any, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """A direction scaled to length 1."""
    if array is None:
        return None
    direction = torch.from_numpy(array).double()
    return (direction / direction.norm(dim=-1, keepdim=True)).to(device, dtype)


def _coordinate(vectors: Tensor, direction: Tensor) -> Tensor:
    """Dot products (..., 1) of vectors (..., W) with a direction."""
    terms = vectors * direction
    width = 1 << (terms.shape[-1] - 1).bit_length()
    terms = F.pad(terms, (0, width - terms.shape[-1]))
    while width > 1:
        width //= 2
        terms = terms[..., :width] + terms[..., width:]
    return terms


def _axis(indices: Sequence[int]) -> Axis:
    """Convert ascending indices to an index along one axis."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices)


def _mesh(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Axis, ...]:
    """An index that selects every combination of the indices along the axes."""
    if sum(isinstance(axis, Tensor) for axis in axes) < 2:
        return tuple(axes)
    last = len(axes) - 1
    return tuple(
        (axis if isinstance(axis, Tensor) else torch.arange(size)[axis]).view(
            -1, *[1] * (last - place)
        )
        for place, (axis, size) in enumerate(zip(axes, shape, strict=True))
    )
