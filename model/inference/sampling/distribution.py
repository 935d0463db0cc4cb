"""Distribution: probabilities, logprobs and ranks of tokens, and the mass and entropy of a row.

The numbers in all replies come from this module, computed in float64 from the engine's rows of
logits (NumPy arrays). Logprobs have the same bits as in the sampler (`sampler.py`).
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
    """One token of a distribution. Rank 1 is the most likely token; ties share the better rank."""

    token_id: int
    prob: float
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Some tokens of a distribution, their total probability (`mass`), and the entropy (nats) of
    the whole distribution."""

    tokens: tuple[TokenProb, ...]
    mass: float
    entropy: float


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Logprobs of a row (V,) of logits; -inf for dropped ids, whose logits are -inf."""
    row = torch.from_numpy(logits.astype(np.float64))
    result: npt.NDArray[np.float64] = row.log_softmax(dim=-1).numpy()
    return result


def largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest values of a row, in descending order of value. Ties are
    ordered by index."""
    row = torch.from_numpy(values)[None]
    indices: npt.NDArray[np.int64] = largest_ids(row, min(count, len(values)))[0].numpy()
    return indices


def largest_ids(rows: Tensor, count: int) -> Tensor:
    """Ids (R, count) of the largest values of each row (R, V), in descending order of value. Ties
    are ordered by id, which torch.topk does not guarantee."""
    if not count:
        return rows.new_empty((len(rows), 0), dtype=torch.int64)
    # 1) Take the ids of topk, and sort them by id, then stably by value. Keep the next value too.
    values, ids = rows.topk(min(count + 1, rows.shape[1]), dim=1)
    ids = ids[:, :count].sort(dim=1).values
    order = rows.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    # 2) If the next value equals the last one, topk chose between ties: sort the whole row.
    if count < rows.shape[1]:
        for row in (values[:, count] == values[:, count - 1]).nonzero()[:, 0].tolist():
            ids[row] = rows[row].sort(descending=True, stable=True).indices[:count]
    return ids


def summarize(
    logits: npt.NDArray[Any], *, top_k: int | None = None, token_ids: Sequence[int] | None = None
) -> Summary:
    """Summarize a row (V,) of logits: its `top_k` most likely ids, without dropped ids (-inf), or
    the given ids in the given order."""
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
    mass = everything[np.unique(ids)].sum()  # a repeated id counts once
    possible = everything > 0  # p log p counts as 0 for p = 0
    entropy = -(everything[possible] * logprobs[possible]).sum()
    return Summary(tokens, float(mass), float(entropy))
