"""Spread: compared with NumPy's percentiles."""

import random

import numpy as np
import pytest

from benchmarks.spread import Spread, percentile


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 1000])
@pytest.mark.parametrize("percent", [0, 1, 50, 99, 99.9, 100])
def test_percentiles_are_numpys(count: int, percent: float) -> None:
    drawn = random.Random(count)
    numbers = sorted(drawn.expovariate(1.0) for _ in range(count))
    assert percentile(numbers, percent) == pytest.approx(np.percentile(numbers, percent), rel=1e-12)


def test_spread_sorts_its_values() -> None:
    times = [3.0, 1.0, 2.0, 10.0]
    spread = Spread.of(iter(times))
    assert spread is not None
    assert [spread.p50, spread.p99] == pytest.approx(np.percentile(times, [50, 99]))


def test_spread_of_no_times_is_none() -> None:
    assert Spread.of([]) is None
