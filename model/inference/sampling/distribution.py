"""Distribution: what one row of logits says about the next token.

In float64. Rows arrive from the engine as NumPy arrays; logprobs are computed as the sampler's
(`sampler.py`), with the same bits. Defines probability, logprob, rank, entropy and mass for every
reply that names them; samples nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class TokenProb:
    """One id of a distribution; rank 1 is the likeliest, equals share the better rank."""

    token_id: int
    prob: float
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Some ids of a distribution, their mass together, and the entropy (nats) of all of it."""

    tokens: tuple[TokenProb, ...]
    mass: float
    entropy: float


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Logprobs of a row (V,) of logits; -inf, of an id that was dropped, stays -inf."""
    row = torch.from_numpy(logits.astype(np.float64))
    result: npt.NDArray[np.float64] = row.log_softmax(dim=-1).numpy()
    return result


def largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest of a row, descending; equals in the order of their index."""
    count = min(count, len(values))
    # Whatever is at least the count-th largest, equals included, then a stable sort of those.
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order][:count]


def summarise(
    logits: npt.NDArray[Any], *, top_k: int | None = None, token_ids: Sequence[int] | None = None
) -> Summary:
    """The `top_k` likeliest ids of a row (V,), or the given ones in the given order. An id that was
    dropped (-inf) is not among the likeliest."""
    logprobs = log_softmax(logits)
    if token_ids is None:
        ids = largest(logprobs, top_k or 0)
        ids = ids[logprobs[ids] > -np.inf]
    else:
        ids = np.asarray(token_ids)
    ascending = np.sort(logprobs)
    chosen = logprobs[ids]
    ranks = len(logprobs) - np.searchsorted(ascending, chosen, side="right") + 1
    probs = np.exp(chosen)
    tokens = tuple(
        TokenProb(int(i), float(prob), float(logprob), int(rank))
        for i, prob, logprob, rank in zip(ids, probs, chosen, ranks, strict=True)
    )
    everything = np.exp(logprobs)
    mass = everything[np.unique(ids)].sum()  # an id that is named twice is one token
    possible = everything > 0  # the limit of p log p at 0 is 0
    entropy = -(everything[possible] * logprobs[possible]).sum()
    return Summary(tokens, float(mass), float(entropy))
