"""Combinations of parameters that run always, and those of the slow set alone.

For tests of many combinations that take their time. Of `combinations`, every value of a parameter
meets every value of each other one in the quick half; of `values`, each value occurs.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest


def combinations(*choices: Sequence[Any]) -> list[Any]:
    """All combinations of three or more parameters, for `pytest.mark.parametrize`: those whose
    indices add up to an odd number are slow. Of two parameters not every pair would be left."""
    assert len(choices) > 2
    assert all(len(choice) > 1 for choice in choices)
    return _marked(choices, lambda indices: sum(indices) % 2 == 0)


def values(*choices: Sequence[Any]) -> list[Any]:
    """All combinations of parameters, the first of which has the most values, for
    `pytest.mark.parametrize`: quick is one for each of its values, and the others count on beside
    it, like the digits of a number. The rest is slow."""
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
