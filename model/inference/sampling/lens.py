"""Lens: what the head says of a layer's residual stream, in numbers.

The logit lens (nostalgebraist, 2020, "interpreting GPT: the logit lens"): the final norm and the
head are put on the stream after each layer, as if the model stopped there. Here are the figures of
a row of such logits: its likeliest ids, the rank and logprob of named ones, its entropy, and the
divergence of the model's own answer from it. Their definitions are those of `distribution.py`; this
is the same for many rows, in torch. Not here: the streams and the logits
(`model/inference/engine/outputs.py`).

Shapes: P rows, V ids, K likeliest, N named.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def lens_width(top_k: int, named: int) -> int:
    """Figures of a row: id and logprob of each of the likeliest, logprob and rank of each named id,
    the entropy and the divergence."""
    return 2 * top_k + 2 * named + 2


@torch.no_grad()
def lens_numbers(logits: Tensor, last: Tensor, top_k: int, token_ids: Sequence[int]) -> Tensor:
    """The numbers (P, width) float32 of logits (P, V); `last` are the logprobs (P, V), float64, of
    the model's own answer.

    The divergence is the Kullback-Leibler divergence of that answer from this one, in nats:
    sum p_last (log p_last - log p).
    """
    logprobs = log_softmax(logits)
    probs = logprobs.exp()
    # The limit of p log p at 0 is 0.
    entropy = -torch.where(probs > 0, probs * logprobs, 0).sum(dim=-1)
    own = last.exp()
    divergence = torch.where(own > 0, own * (last - logprobs), 0).sum(dim=-1).clamp(min=0)
    ids = _largest(logits, top_k)  # (P, K)
    named = logprobs[:, list(token_ids)]  # (P, N)
    better = [(logprobs > named[:, [n]]).sum(dim=-1) for n in range(len(token_ids))]
    ranks = 1 + torch.stack(better, dim=1) if better else named
    parts = [ids, logprobs.gather(1, ids), named, ranks, entropy[:, None], divergence[:, None]]
    return torch.cat([part.float() for part in parts], dim=1)


def log_softmax(logits: Tensor) -> Tensor:
    """Logprobs (P, V) in float64."""
    return logits.double().log_softmax(dim=-1)


def _largest(logits: Tensor, count: int) -> Tensor:
    """Ids (P, count) of the largest logits of each row, descending; equals in the order of their
    ids, which torch.topk does not promise."""
    least = logits.topk(count, dim=-1).values[:, -1:]  # (P, 1)
    rows = []
    for row, threshold in zip(logits, least, strict=True):
        candidates = torch.nonzero(row >= threshold).squeeze(1)  # ascending
        order = row[candidates].argsort(descending=True, stable=True)
        chosen = candidates[order][:count]
        # Among logits that are not numbers nothing is the largest.
        rows.append(chosen if len(chosen) == count else torch.arange(count, device=row.device))
    return torch.stack(rows)


@dataclass(frozen=True, slots=True)
class LensRow:
    """The figures of a row, by their names; logprobs and entropy in nats, rank 1 is the likeliest,
    equals share the better rank."""

    top_ids: npt.NDArray[np.int64]  # (K,)
    top_logprobs: npt.NDArray[np.float32]  # (K,)
    logprobs: npt.NDArray[np.float32]  # (N,) of the named ids
    ranks: npt.NDArray[np.int64]  # (N,)
    entropy: float
    divergence: float


def read_lens(numbers: npt.NDArray[Any], top_k: int, named: int) -> LensRow:
    """The row (width,) that `lens_numbers` gives."""
    top, rest = numbers[: 2 * top_k], numbers[2 * top_k :]
    return LensRow(
        top_ids=top[:top_k].astype(np.int64),
        top_logprobs=top[top_k:],
        logprobs=rest[:named],
        ranks=rest[named : 2 * named].astype(np.int64),
        entropy=float(rest[-2]),
        divergence=float(rest[-1]),
    )
