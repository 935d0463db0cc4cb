"""Philox4x32-10: random numbers as a pure function of a key and a counter.

The uniform number of a token depends only on the seed, the position of the token, and the index of
its sequence among the n sequences of its prompt. So it is the same in any batch and after any
restart.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The
tests compare this implementation with the known-answer vectors of the authors' Random123 library.
Words are Python integers or uint64 arrays; both give the same bits.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
FEW = 16
"""Maximum number of values that are computed one by one. Computing an array of any size takes about
150 small NumPy operations, which together take as long as computing this many values one by one."""

Words = Any
"""An integer, or an array of uint64."""


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """The four 32-bit words for a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0  # 64 bits
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


def uniform(seed: Words, position: Words, index: Words) -> Any:
    """A number in [0, 1) with 53 random bits, for the token at an absolute position of sequence
    `index`."""
    first, second, _, _ = philox((position, index, 0, 0), (seed & _MASK, seed >> 32))
    return ((first >> 5) * 2**26 + (second >> 6)) / 2**53


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[Any], indices: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """`uniform` for several rows. All arguments are unsigned integers (R,)."""
    if len(seeds) <= FEW:
        keys = zip(seeds.tolist(), positions.tolist(), indices.tolist(), strict=True)
        return np.array([uniform(*key) for key in keys])
    numbers: npt.NDArray[np.float64] = uniform(
        seeds, positions.astype(np.uint64), indices.astype(np.uint64)
    )
    return numbers
