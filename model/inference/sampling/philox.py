"""Philox4x32-10: random numbers as a pure function of a key and a counter.

The uniform number of a token depends only on the seed, the position of the token, and the index of
its sequence among the n of its prompt. So it is the same in any batch and after any restart.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The
tests compare with the known answers of the authors' Random123 library. Up to FEW numbers are
computed with Python's integers, more with arrays; the bits are the same.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
FEW = 16
"""Maximum number of values that are computed one by one. Arrays of any size take about 150 small
operations, which cost as much as this many single values."""

Integers = npt.NDArray[np.uint64]
_LOW, _HALF = np.uint64(_MASK), np.uint64(32)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four 32-bit words for a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits, for the token at an absolute position of sequence
    `index`."""
    first, second, _, _ = philox((position, index, 0, 0), (seed & _MASK, seed >> 32))
    return ((first >> 5) * 2**26 + (second >> 6)) / 2**53


def philox_words(
    counter: tuple[Integers, Integers], key: tuple[Integers, Integers]
) -> tuple[Integers, Integers]:
    """The first two words of `philox` for counters (c0, c1, 0, 0). All arrays have the same shape
    and hold words in [0, 2^32) as uint64."""
    c0, c1 = counter
    c2, c3 = np.zeros_like(c0), np.zeros_like(c1)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * np.uint64(_MULTIPLIERS[0])  # 64 bits
        product1 = c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = k0 + np.uint64(_KEY_STEPS[0]) & _LOW
        k1 = k1 + np.uint64(_KEY_STEPS[1]) & _LOW
    return c0, c1


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[Any], indices: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """`uniform` for several rows. All arguments are unsigned integers (R,)."""
    if len(seeds) <= FEW:
        keys = zip(seeds.tolist(), positions.tolist(), indices.tolist(), strict=True)
        return np.array([uniform(*key) for key in keys])
    counter = positions.astype(np.uint64), indices.astype(np.uint64)
    first, second = philox_words(counter, (seeds & _LOW, seeds >> _HALF))
    return ((first >> np.uint64(5)) * np.uint64(2**26) + (second >> np.uint64(6))) / 2.0**53
