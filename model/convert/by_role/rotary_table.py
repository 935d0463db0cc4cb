"""Rotary tables: reads layout, width and theta from a file's cosines, sines, angles or frequencies.

Supports tables that store each angle once or twice, complex tables (also as pairs of real numbers),
and lists of frequencies. Every other tensor with the name of a rotary table is refused, and so are
scaled frequencies.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.computation import RotaryLayout
from logitd.model.convert.foreign import ConvertError

TOLERANCE = 1e-3
"""Largest difference from the exact table that is attributed to rounding in float32. It is absolute
for cosines and sines, and relative for angles and frequencies."""

TINY = 1e-30
"""A divisor that is less than any angle except 0."""


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """A table (T, pairs) or (T, 2 * pairs), or a list of frequencies (pairs,). `stacked` is True if
    the file stores complex numbers as pairs of real numbers."""

    name: str
    values: Tensor
    stacked: bool = False

    @property
    def _last(self) -> str:
        return words.snake_case(self.name.rpartition(".")[2])

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
        if self.stacked:
            return None
        return "interleaved" if self.values.is_complex() else self._repeats

    @property
    def width(self) -> int:
        """Number of channels of a head that are rotated."""
        width = int(self.values.shape[-1])
        return width if self._repeats else 2 * width

    @property
    def theta(self) -> float | None:
        """The base theta of the frequencies theta^(-2i / D); None if there is only one frequency.
        Raises ConvertError if the table does not follow the formula."""
        once = self._once.double() if not self.values.is_complex() else self._once
        if once.dim() > 2:
            raise self._unlike(f"its shape is {list(self.values.shape)}")
        pairs, wave = once.shape[-1], self._wave
        row = once if once.dim() == 1 else once[1]
        row = {"cos": torch.acos, "sin": torch.asin, "complex": torch.angle}.get(wave, abs)(row)
        # A cosine near 1 is too inexact for the last frequency.
        index = min(1, pairs - 1) if wave == "cos" else pairs - 1
        theta = None
        if pairs > 1:
            if not 0 < float(row[index]) < 1:
                raise self._unlike(f"its frequency {index} is {float(row[index]):g}")
            theta = self._rounded(float(row[index]) ** -(pairs / index), wave)
        self._check(once, theta or 1.0, wave)
        return theta

    @property
    def _wave(self) -> str:
        if self.values.is_complex():
            return "complex"
        found = [kind for kind in ("cos", "sin") if kind in self._last]
        return found[0] if found and self.values.dim() == 2 else "angle"

    def _rounded(self, theta: float, wave: str) -> float:
        """Theta without the digits that come from rounding the table."""
        rounded = float(f"{theta:.3g}")
        eps = torch.finfo(self.values.dtype).eps
        close = 0.002 if wave == "cos" else max(1e-5, 2 * eps)
        return rounded if abs(theta - rounded) < close * theta else theta

    def _check(self, table: Tensor, theta: float, wave: str) -> None:
        pairs = table.shape[-1]
        expected = theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        if table.dim() == 2:
            expected = torch.arange(len(table))[:, None] * expected
        tolerance = max(TOLERANCE, torch.finfo(self.values.dtype).eps)
        match wave:
            case "angle":
                difference = float(((table - expected).abs() / expected.clamp(min=TINY)).max())
            case "complex":
                difference = float((table - torch.polar(expected**0, expected)).abs().max())
            case _:
                expected = expected.cos() if wave == "cos" else expected.sin()
                difference = float((table - expected).abs().max())
        if not difference <= tolerance:
            raise self._unlike(
                f"it differs from the table of theta {theta:g} by up to {difference:.2g}"
            )

    def _unlike(self, reason: str) -> ConvertError:
        return ConvertError(
            f"{self.name} has the name of a rotary table, but {reason}: its frequencies are "
            "scaled, or computed in a way that is not recognized. Serve the owner's class with "
            "--code FILE:NAME --run-code"
        )


def is_rotary(name: str, tensor: Tensor) -> bool:
    """True if a tensor has the name of a rotary table, or complex numbers of absolute value 1."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return False
    if tensor.is_complex():
        return bool((tensor.abs() - 1).abs().max() < TOLERANCE)
    return tensor.is_floating_point() and words.matches(words.ROTARY, last_part(name))


def last_part(name: str) -> str:
    """The last part of a tensor's name, without underscores at its beginning."""
    return name.rpartition(".")[2].lstrip("_")


def rotary_tables(ignored: Mapping[str, Tensor]) -> list[RotaryTable]:
    """The rotary tables among the tensors that are not weights. Axes of length 1 are removed, and
    pairs of a cosine and a sine become complex numbers."""
    return [_table(name, tensor) for name, tensor in ignored.items() if is_rotary(name, tensor)]


def _table(name: str, tensor: Tensor) -> RotaryTable:
    values = tensor.squeeze() if tensor.numel() > 1 else tensor.reshape(1)
    if values.dim() == 3 and values.shape[-1] == 2:
        pairs = torch.view_as_complex(values.float().contiguous())
        if (pairs.abs() - 1).abs().max() < TOLERANCE:
            return RotaryTable(name, pairs, stacked=True)
    return RotaryTable(name, values)
