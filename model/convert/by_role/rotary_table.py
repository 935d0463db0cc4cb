"""Rotary tables: reads layout, width and theta from a file's cosines, sines, angles or frequencies.

Supports tables that store each angle once or twice, complex tables, and lists of frequencies.
Tables with scaled frequencies are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from logitd.model.convert.by_role.computation import RotaryLayout
from logitd.model.convert.foreign import ConvertError

MARKS = ("cos", "sin", "freq", "rope", "theta", "angle")
"""Words that occur in the names of rotary tables."""
TOLERANCE = 1e-3
"""Largest difference from the exact table that is attributed to rounding to float32 or bfloat16."""


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """A table (T, pairs) or (T, 2 * pairs), or a list of frequencies (pairs,)."""

    name: str
    values: Tensor

    @property
    def _last(self) -> str:
        return self.name.rpartition(".")[2].lower()

    @property
    def _repeats(self) -> RotaryLayout | None:
        """The order of the columns if each angle is stored twice; None if each is stored once."""
        if self.values.dim() != 2 or self.values.is_complex() or self.values.shape[1] % 2:
            return None
        if torch.equal(*self.values.chunk(2, dim=1)):
            return "half"
        if torch.equal(self.values[:, 0::2], self.values[:, 1::2]):
            return "interleaved"
        return None

    @property
    def _once(self) -> Tensor:
        match self._repeats:
            case "half":
                return self.values.chunk(2, dim=1)[0]
            case "interleaved":
                return self.values[:, 0::2]
        return self.values

    @property
    def layout(self) -> RotaryLayout | None:
        """Which channels are rotated together; None if the table does not show it."""
        return "interleaved" if self.values.is_complex() else self._repeats

    @property
    def width(self) -> int:
        """Number of channels of a head that are rotated."""
        width = int(self.values.shape[-1])
        twice = ("cos" in self.name.lower() or "sin" in self.name.lower()) and self._repeats
        return width if twice else 2 * width

    @property
    def theta(self) -> float | None:
        """The base theta of the frequencies theta^(-2i / D), computed from the frequency with i =
        1; None if the table does not show it. Raises ConvertError if the frequencies do not follow
        the formula."""
        row = None
        if self.values.dim() == 1:
            if "inv" in self._last and len(self.values) > 1 and float(self.values[0]) == 1.0:
                row = self.values
        elif len(self.values) > 1 and ("cos" in self._last or self.values.is_complex()):
            second = self._once[1]
            row = second.angle() if self.values.is_complex() else second.double().acos()
        if row is None or len(row) < 2 or not 0 < float(row[1]) < 1:
            return None
        theta = float(row[1]) ** -float(len(row))
        rounded = float(f"{theta:.3g}")  # 1 / theta^(1 / pairs) was stored in float32
        theta = rounded if abs(theta - rounded) < 0.002 * theta else theta
        self._check(theta)
        return theta

    def _check(self, theta: float) -> None:
        table = self._once.real if self.values.is_complex() else self._once
        pairs = table.shape[-1]
        expected = theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        if table.dim() == 2:
            expected = (torch.arange(len(table))[:, None] * expected).cos()
        difference = float((table.double() - expected).abs().max())
        if difference > TOLERANCE:
            raise ConvertError(
                f"{self.name} differs from the rotary table of theta {theta:g} by up to "
                f"{difference:.2g}: its frequencies are scaled in a way that is not recognized"
            )


def rotary_tables(ignored: Mapping[str, Tensor]) -> list[RotaryTable]:
    """The rotary tables among the tensors that are not weights. Axes of length 1 are removed."""
    return [
        RotaryTable(name, tensor.squeeze())
        for name, tensor in ignored.items()
        if any(mark in name.rpartition(".")[2].lower() for mark in MARKS)
        and tensor.squeeze().dim() in (1, 2)
        and tensor.numel() > 1
    ]
