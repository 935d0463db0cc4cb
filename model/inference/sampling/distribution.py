"""Distribution: probability, logprob, rank, entropy and mass of next tokens, for every reply.

In float64, from the rows of logits of the engine, which are NumPy arrays. Logprobs have the bits
of the sampler's (`sampler.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenProb:
    """One id of a distribution. Rank 1 is the likeliest; equals share the better rank."""

    token_id: int
    prob: float
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Some ids of a distribution, their total mass, and the entropy (nats) of the whole."""

    tokens: tuple[TokenProb, ...]
    mass: float
    entropy: float


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Logprobs of a row (V,) of logits. The -inf of a dropped id stays -inf."""
    row = torch.from_numpy(logits.astype(np.float64))
    result: npt.NDArray[np.float64] = row.log_softmax(dim=-1).numpy()
    return result


def largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest of a row, descending; equals in the order of their index."""
    row = torch.from_numpy(values)[None]
    indices: npt.NDArray[np.int64] = largest_ids(row, min(count, len(values)))[0].numpy()
    return indices


def largest_ids(rows: Tensor, count: int) -> Tensor:
    """Ids (R, count) of the largest of each row (R, V), descending; equals in the order of their
    ids, which torch.topk does not promise."""
    if not count:
        return rows.new_empty((len(rows), 0), dtype=torch.int64)
    # 1) The ids of topk, sorted by id, then stably by value; and the value of the next one.
    values, ids = rows.topk(min(count + 1, rows.shape[1]), dim=1)
    ids = ids[:, :count].sort(dim=1).values
    order = rows.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    # 2) If the next one equals the last, topk chose between equals: sort that row whole.
    if count < rows.shape[1]:
        for row in (values[:, count] == values[:, count - 1]).nonzero()[:, 0].tolist():
            ids[row] = rows[row].sort(descending=True, stable=True).indices[:count]
    return ids


def summarise(
    logits: npt.NDArray[Any], *, top_k: int | None = None, token_ids: Sequence[int] | None = None
) -> Summary:
    """The `top_k` likeliest ids of a row (V,) without dropped ones (-inf), or the given ids in the
    given order."""
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
    mass = everything[np.unique(ids)].sum()  # an id counts once, however often it is named
    possible = everything > 0  # p log p tends to 0 at 0
    entropy = -(everything[possible] * logprobs[possible]).sum()
    return Summary(tokens, float(mass), float(entropy))
