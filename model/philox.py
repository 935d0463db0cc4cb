"""Philox4x32-10: random numbers as a pure function of a key and a counter.

The draw of a token depends on its seed, its position and its index among the n of its prompt, and
on nothing that happened before; so it is the same in any batch and after any restart.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The
tests hold it to the known answers of the authors' Random123 library.

Twice here: on Python's integers for one draw, and on tensors for all draws of a step, where they
are computed (`model/kernels/device_draw.py`). Both give the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words of a 128-bit counter under a 64-bit key."""
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
    """The one draw for the token at an absolute position of sequence `index`: [0, 1), 53 bits."""
    first, second, _, _ = philox((position, index, 0, 0), (seed & _MASK, seed >> 32))
    return ((first >> 5) * 2**26 + (second >> 6)) / 2**53


class Words(NamedTuple):
    """The first two of four 32-bit words, in int64 tensors of any shape."""

    first: Tensor
    second: Tensor


def philox_words(counter: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Words:
    """`philox` of counters (c0, c1, 0, 0), all tensors int64 of one shape with words in [0, 2^32).

    A product of two words has 64 bits and wraps around in int64; its low 32 bits are right all the
    same, and its high ones once the sign that the shift drags along is masked off.
    """
    c0, c1 = counter
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c1)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32 & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32 & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = k0 + _KEY_STEPS[0] & _MASK
        k1 = k1 + _KEY_STEPS[1] & _MASK
    return Words(c0, c1)


def uniforms(seeds: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
    """`uniform` of each element, float64. All int64 of one shape; a seed of 2^63 or more is given
    as the negative number that has its bits."""
    first, second = philox_words((positions, indices), (seeds & _MASK, seeds >> 32 & _MASK))
    return ((first >> 5) * 2**26 + (second >> 6)).double() / 2**53
