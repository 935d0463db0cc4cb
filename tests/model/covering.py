"""Combinations of parameters: some always run, the rest only in the slow set.

For tests with many slow combinations. With `combinations`, the quick half includes every pair of
values of two parameters; with `values`, it includes every value.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest


def combinations(*choices: Sequence[Any]) -> list[Any]:
    """All combinations of three or more parameters, for `pytest.mark.parametrize`. A combination is
    marked as slow if the sum of its indices is odd. With only two parameters, some pairs of values
    would run only in the slow set."""
    assert len(choices) > 2
    assert all(len(choice) > 1 for choice in choices)
    return _marked(choices, lambda indices: sum(indices) % 2 == 0)


def values(*choices: Sequence[Any]) -> list[Any]:
    """All combinations of parameters, for `pytest.mark.parametrize`. The first parameter must have
    the most values. The quick set has one combination for each value of the first parameter. In
    these combinations, the indices of the other parameters count up like the digits of a number.
    All other combinations are marked as slow."""
    longest, *others = map(len, choices)
    assert longest >= max(others)
    quick = set()
    for turn in range(longest):
        indices, rest = [turn], turn
        for base in others:
            rest, index = divmod(rest, base)
            indices.append(index)
        quick.add(tuple(indices))
    return _marked(choices, quick.__contains__)


def _marked(
    choices: Sequence[Sequence[Any]], quick: Callable[[tuple[int, ...]], bool]
) -> list[Any]:
    return [
        pytest.param(
            *(choice[index] for choice, index in zip(choices, indices, strict=True)),
            marks=[] if quick(indices) else [pytest.mark.slow],
        )
        for indices in product(*(range(len(choice)) for choice in choices))
    ]
