"""Philox: the authors' known answers, and the properties of a draw that the engine needs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.sampling.philox import FEW, philox, uniform, uniforms

ALL_ONES = 0xFFFFFFFF

# `philox4x32 10` in the known-answer file of the Random123 library: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (ALL_ONES, ALL_ONES, ALL_ONES, ALL_ONES),
        (ALL_ONES, ALL_ONES),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_authors_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == answer


def test_draw_is_53_bits_of_the_first_two_words() -> None:
    """Key = seed, counter = (position, index); 27 bits of one word, then 26 of the next."""
    position, index, seed = 0x243F6A88, 0x85A308D3, 0x299F31D0A4093822
    first, second, *_ = philox((position, index, 0, 0), (0xA4093822, 0x299F31D0))
    bits = f"{first:032b}"[:27] + f"{second:032b}"[:26]
    assert uniform(seed, position, index) == int(bits, 2) / 2**53


@pytest.mark.parametrize("along", ["seed", "position", "index"])
def test_draws_are_uniform_along_each_argument(along: str) -> None:
    """20,000 draws: their mean, their mean square, the fraction in each tenth of [0, 1), and no
    correlation between successive draws."""
    place = {"seed": 5, "position": 7, "index": 0}
    draws = [uniform(**(place | {along: i})) for i in range(20_000)]
    assert abs(sum(draws) / 20_000 - 1 / 2) < 5 / math.sqrt(12 * 20_000)
    assert abs(sum(u * u for u in draws) / 20_000 - 1 / 3) < 0.01
    for tenth in range(10):
        share = sum(tenth <= 10 * u < tenth + 1 for u in draws) / 20_000
        assert abs(share - 0.1) < 5 * math.sqrt(0.09 / 20_000)
    lagged = sum((u - 0.5) * (v - 0.5) for u, v in itertools.pairwise(draws)) / 20_000
    assert abs(lagged) < 5 / 12 / math.sqrt(20_000)


@given(
    places=st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
        min_size=1,
        max_size=4 * FEW,
    )
)
def test_uniforms_of_arrays_equal_single_draws(places: list[tuple[int, int, int]]) -> None:
    """The arrays are short or long, and have the dtypes of a step's draws."""
    seeds, positions, indices = zip(*places, strict=True)
    drawn = uniforms(
        np.array(seeds, np.uint64), np.array(positions, np.uint32), np.array(indices, np.uint32)
    )
    assert drawn.dtype == np.float64
    assert drawn.tolist() == [uniform(*place) for place in places]
