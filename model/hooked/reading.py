"""Reading: how a layer reads parts of the residual stream, and selection along an axis.

Shapes: C = d_model, O = number of directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Where = int | tuple[int | None, ...] | slice | Sequence[int] | Tensor | None
"""A selection along an axis: one index, which removes the axis; a tuple of arguments for `slice`;
several indices; or None, which selects everything."""


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Division by the scale of a norm, and projection onto directions. Both are linear, so a unit's
    row of W_out is projected once and then multiplied by the unit's value at each position. The
    vectors (C,) that the units write at each position are never computed.

    scale     (..., 1); None: no norm
    centered  True if the norm subtracts the mean
    onto      directions (C,) or (C, O); None: no projection
    """

    scale: Tensor | None
    centered: bool
    onto: Tensor | None

    def __call__(self, parts: Tensor) -> Tensor:
        """Apply the reading to parts of the stream (..., C). The result is (..., C), (...,) or
        (..., O)."""
        return self.scaled(self.vectors(parts))

    def vectors(self, vectors: Tensor) -> Tensor:
        """Vectors (..., C), centered and projected: (..., C), (..., 1) or (..., O)."""
        if self.centered:
            vectors = vectors - vectors.mean(dim=-1, keepdim=True)
        if self.onto is None:
            return vectors
        return vectors @ (self.onto[:, None] if self.onto.ndim == 1 else self.onto)

    def scaled(self, read: Tensor) -> Tensor:
        """Results of `vectors`, divided by the scale. For a single direction (C,), the result has
        no axis of directions."""
        if self.scale is not None:
            read = read / self.scale
        return read[..., 0] if self.onto is not None and self.onto.ndim == 1 else read


def take(tensor: Tensor, where: Where, axis: int) -> Tensor:
    """Select along an axis; see `Where`."""
    if where is None:
        return tensor
    index: list[Any] = [slice(None)] * tensor.ndim
    index[axis] = slice(*where) if isinstance(where, tuple) else where
    return tensor[tuple(index)]
