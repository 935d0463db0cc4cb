"""Values that attributions and circuits keep from a forward pass: stages, and norms with a fixed
scale.

Direct contributions and circuits both hold the scale of each norm at its value in the forward pass,
so that the norm is a linear map.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor, nn


class KeptStages:
    """A tap on one block. For each stage in `names`, it stores `part(value)` in `kept` under the
    name of the stage. Without `part`, it stores the value as a separate node of the autograd
    graph."""

    def __init__(
        self, names: Collection[str], part: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._names, self._part = frozenset(names), part
        self.kept: dict[str, Tensor] = {}

    def wants(self, layer: int | None, stage: str) -> bool:
        return stage in self._names

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        if stage not in self._names:
            return value
        if self._part is None:
            value = self.kept[stage] = value.view_as(value)
        else:
            self.kept[stage] = self._part(value.detach())
        return value


@dataclass(frozen=True, slots=True)
class FrozenNorm:
    """A norm without its bias and with a fixed scale (..., 1): a linear map of each row."""

    weight: Tensor
    scale: Tensor
    centered: bool

    def forward(self, x: Tensor, positions: Tensor | slice = slice(None)) -> Tensor:
        """Apply the norm to rows (..., C) at the given positions."""
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        return x * self.weight / self.scale[positions]

    def backward(self, g: Tensor) -> Tensor:
        """The gradient (..., C) with respect to the norm's input."""
        g = g * self.weight
        g = g - g.mean(-1, keepdim=True) if self.centered else g
        return g / self.scale


def freeze_norm(norm: nn.Module, x: Tensor) -> FrozenNorm:
    """Fix the scale of a norm at its value for the input x (..., C)."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    assert norm.eps is not None
    centered = isinstance(norm, nn.LayerNorm)
    spread = x - x.mean(-1, keepdim=True) if centered else x
    scale = root_mean_square(spread, norm.eps)
    return FrozenNorm(norm.weight.detach().to(x.dtype), scale, centered)


def root_mean_square(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()
