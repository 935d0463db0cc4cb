"""Interface of a peer: two questions that every peer answers in the same units.

Like `weights.py` and `worker.py`, this module imports only the standard library and numpy, because
the interpreter with a peer's packages may lack those of this project.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

LEAST = 100
"""Least number of tokens whose log-probabilities a peer must return to be compared."""


@dataclass(frozen=True, slots=True)
class Run:
    """Times of one generation.

    prefill_seconds  from the prompts to the first token of the last of them
    step_seconds     of each step after that, a token for every sequence, drawing included
    """

    prefill_seconds: float
    step_seconds: list[float]


class Unsupported(Exception):
    """The peer does not support the request; the message says why."""


class Peer(Protocol):
    """A model that some library holds, loaded in one dtype."""

    @property
    def about(self) -> str:
        """Version and settings, for people."""

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        """Log-probabilities (V,) of the token after `ids`, the last of which is computed by a
        decode step: so they depend on the cache too. NaN where the peer does not tell; of
        LEAST tokens it has to."""

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        """Compute prompts of one length together, draw a token for each, then `steps` more for
        all of them, at temperature 1 from the whole vocabulary. Nothing is kept from run to
        run."""


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities (V,) of logits (V,)."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


def disagreement(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Distance of log-probabilities from the expected ones: the root mean square of the difference,
    relative to their standard deviation over tokens. NaN entries are skipped; infinite if too few
    are left."""
    told = ~np.isnan(actual)
    if told.sum() < min(LEAST, len(expected)):
        return math.inf
    difference = actual[told] - expected[told]
    return float(np.sqrt(np.mean(difference**2)) / np.std(expected))
