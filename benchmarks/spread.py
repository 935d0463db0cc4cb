"""Spread: the middle and the far end of measured times."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """Half of the times are no longer than p50, 99 of 100 no longer than p99. Seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, times: Iterable[float]) -> Self | None:
        """None of no times."""
        ordered = sorted(times)
        return cls(percentile(ordered, 50), percentile(ordered, 99)) if ordered else None


def percentile(ordered: list[float], percent: float) -> float:
    """A percentile of ascending numbers, one at least; between two of them on the straight line,
    as NumPy's default has it."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
