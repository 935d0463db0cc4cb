"""Spread: the median and the 99th percentile of measured times."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds. Half of the times are at most p50, and 99 of 100 are at most p99."""

    p50: float
    p99: float

    @classmethod
    def of(cls, times: Iterable[float]) -> Self | None:
        """The spread of times; None if there are none."""
        ordered = sorted(times)
        return cls(percentile(ordered, 50), percentile(ordered, 99)) if ordered else None


def percentile(ordered: list[float], percent: float) -> float:
    """A percentile of a non-empty sequence of ascending numbers. Interpolates linearly between two
    numbers, as NumPy does by default."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
