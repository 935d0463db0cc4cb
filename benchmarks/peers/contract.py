"""Interface of a peer: two measurements, which every peer reports in the same units.

Like `weights.py` and `worker.py`, this module imports only the standard library and numpy, because
the interpreter with a peer's packages may lack this project's packages.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

LEAST = 100
"""Minimum number of tokens whose log-probabilities a peer must return to be compared."""


@dataclass(frozen=True, slots=True)
class Run:
    """Times of one generation.

    prefill_seconds  time until the last prompt has its first token
    step_seconds     time of each later step, which draws a token for every sequence
    """

    prefill_seconds: float
    step_seconds: list[float]


class Unsupported(Exception):
    """Raised if the peer does not support the request; the message gives the reason."""


class Peer(Protocol):
    """A model loaded by some library in one dtype."""

    @property
    def about(self) -> str:
        """Version and settings, for display."""

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        """Log-probabilities (V,) of the token after `ids`. A decode step computes the last id, so
        they depend on the cache too. NaN for tokens that the peer does not report; it must report
        at least LEAST tokens."""

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        """Compute prompts of equal length together, draw a token for each, then draw `steps` more
        tokens for each, at temperature 1 from the whole vocabulary. Nothing is kept between
        runs."""


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities (V,) of logits (V,)."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


def disagreement(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Distance of log-probabilities from the expected ones: the root mean square of the difference,
    divided by the standard deviation of the expected log-probabilities. NaN entries are skipped;
    the distance is infinite if too few entries are left."""
    reported = ~np.isnan(actual)
    if reported.sum() < min(LEAST, len(expected)):
        return math.inf
    difference = actual[reported] - expected[reported]
    return float(np.sqrt(np.mean(difference**2)) / np.std(expected))
