"""Combinations of parameters: some always run, the rest only in the slow set.

For tests with many slow combinations. With `combinations`, the quick half includes every pair of
values of two parameters; with `values`, it includes every value.
"""

import itertools
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.model.factories import FAMILIES

SPANNING = ("gpt2", "neox", "scaled", "nanochat")
"""Families with every kind of norm, residual and feed-forward layer, and with all of nanochat's
options."""

SOME_FAMILIES = [
    pytest.param(name, marks=[] if name in SPANNING else [pytest.mark.slow]) for name in FAMILIES
]
"""All families, as parameters of tests whose computation another test compares with an oracle for
each family. Only the families of SPANNING run in the quick set."""

few_families = pytest.mark.parametrize("gpt", SOME_FAMILIES, indirect=True)
"""Mark of such a test with a fixture `gpt`."""


def combinations(*choices: Sequence[Any]) -> list[Any]:
    """All combinations of three or more parameters, for `pytest.mark.parametrize`. The quick set
    has few combinations that together include every pair of values. Each of them has the most pairs
    that earlier ones lack. All other combinations are marked as slow."""
    assert len(choices) > 2
    every = [*product(*(range(len(choice)) for choice in choices))]
    pairs = {indices: {*itertools.combinations(enumerate(indices), 2)} for indices in every}
    missing = set[Any]().union(*pairs.values())
    quick = set()
    while missing:
        best = max(every, key=lambda indices: len(pairs[indices] & missing))
        quick.add(best)
        missing -= pairs[best]
    return _marked(choices, quick.__contains__)


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
