"""What a peer is: two questions that every one of them answers in the same units.

The standard library and numpy alone, like `weights.py` and `worker.py`: an interpreter that has a
peer's packages need not have this project's.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

LEAST = 100
"""Tokens of whose log-probabilities a peer has to tell, to be compared."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one generation took.

    prefill_seconds  from the prompts to the first token of the last of them
    step_seconds     of each step after that, a token for every sequence, drawing included
    """

    prefill_seconds: float
    step_seconds: list[float]


class Unsupported(Exception):
    """What is asked for is nothing that this peer has; the message says why."""


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
    """How far log-probabilities are from those expected: the root mean square of the difference as
    a share of how much they vary from token to token. Of those tokens that are told; infinite
    where too few are."""
    told = ~np.isnan(actual)
    if told.sum() < min(LEAST, len(expected)):
        return math.inf
    difference = actual[told] - expected[told]
    return float(np.sqrt(np.mean(difference**2)) / np.std(expected))
