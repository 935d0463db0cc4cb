"""Spread: the median and the 99th percentile of measured times."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Times in seconds. Half of the times are at most p50, and 99 of 100 are at most p99."""

    p50: float
    p99: float

    @classmethod
    def of(cls, times: Iterable[float]) -> Self | None:
        """The spread of times; None if there are none."""
        seconds = list(times)
        return cls(*np.percentile(seconds, [50, 99]).tolist()) if seconds else None
