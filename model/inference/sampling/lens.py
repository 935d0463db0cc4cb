"""Lens: the statistics of a logit lens, computed from the logits of a layer's residual stream.

The logit lens (nostalgebraist, 2020, "interpreting GPT: the logit lens") applies the final norm and
the head to the stream after each layer. The statistics of such a row of logits are its most likely
ids, the logprob and rank of named ids and of the following token, its entropy, and the divergence
of the model's output from it. They are defined as in `distribution.py`, and computed in torch for
many rows at once. `model/inference/engine/outputs.py` computes the streams and the logits.

The statistics contain logprobs instead of probabilities, because float32 rounds probabilities near
1 to 1 and small ones to 0. Sums are in float64, because float32 sums over a large vocabulary lose
the small divergences of late layers. A row's bits do not depend on the number of rows. For this,
the three sums of a row are always computed together: torch would split a single sum between
threads, which changes its bits.

Shapes: P rows, G rows of a group, V ids, K most likely ids, N named ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logitd.model.inference.sampling.distribution import largest_ids

GROUP_ELEMENTS = 2**20
"""Number of logits in a group of rows. Four work arrays of this size take 32 MiB in float64."""
COUNTED_IDS = 16
"""Maximum number of named ids that are ranked by counting larger logits. If there are more, the row
is sorted."""


def lens_width(top_k: int, named: int) -> int:
    """Number of statistics of a row: id and logprob of each of the `top_k` most likely ids, logprob
    and rank of each named id (including the following token), the entropy and the divergence."""
    return 2 * top_k + 2 * named + 2


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over rows of logits, (G, 1) each, in float64. With s = logit - largest, a logprob is s -
    log_total."""

    largest: Tensor
    log_total: Tensor  # log of the sum of exp(s)
    entropy: Tensor
    weighted: Tensor  # sum of s, weighted by the model's own probabilities

    def logprobs(self, logits: Tensor) -> Tensor:
        """Logprobs of logits (G, ...) that were selected from these rows."""
        return (logits.double() - self.largest) - self.log_total


class LensDigest:
    """Computes the statistics of rows of logits (P, V). `own` (P, V) are the model's own logits,
    from its last layer; all logits are float32. `following` (P,) are the next ids of the text; each
    is added to its row's named ids.

    The divergence is the Kullback-Leibler divergence of the model's own distribution from a
    layer's, in nats: sum p_own (log p_own - log p). The computation takes memory for P x V
    probabilities and four times GROUP_ELEMENTS numbers in float64 (six times with `following`).
    """

    def __init__(
        self,
        own: Tensor,
        top_k: int,
        token_ids: Sequence[int],
        following: Tensor | None = None,
    ) -> None:
        self._own = own
        self._top_k = top_k
        self._following = None if following is None else following[:, None]  # (P, 1)
        self._named = torch.tensor(token_ids, device=own.device, dtype=torch.int64)
        rows, width = own.shape
        size = max(1, GROUP_ELEMENTS // width)
        self._groups = [slice(start, start + size) for start in range(0, rows, size)]
        self._work = own.new_empty((4, min(rows, size), width), dtype=torch.float64)
        self._probs = torch.zeros_like(own, dtype=torch.float64)
        self._entropy = own.new_empty((rows, 1), dtype=torch.float64)
        for group in self._groups:
            logits, probs = own[group], self._probs[group]
            sums = self._sums(logits, probs)
            torch.exp(probs.copy_(logits).sub_(sums.largest).sub_(sums.log_total), out=probs)
            self._entropy[group] = sums.entropy

    def numbers(self, logits: Tensor) -> Tensor:
        """Statistics (P, width) in float32 of a layer's logits (P, V), which may be `own`. If a row
        is not finite, its ids and ranks are undefined and its other values are NaN."""
        return torch.cat([self._of_group(logits, group) for group in self._groups])

    def _of_group(self, logits: Tensor, group: slice) -> Tensor:
        is_own, logits = logits is self._own, logits[group]
        sums = self._sums(logits, self._probs[group])
        divergence = sums.log_total - sums.weighted - self._entropy[group]
        if is_own:
            divergence = 0 * sums.entropy  # exactly 0, or NaN
        ids = largest_ids(logits, self._top_k)
        logprobs = [sums.logprobs(logits[:, self._named])]
        ranks = [_ranks(logits, self._named)]
        if self._following is not None:
            following = self._following[group]
            chosen = logits.gather(1, following)
            if is_own:  # the operations, and so the bits, of `sampler.score`
                logprobs.append(logits.double().log_softmax(dim=-1).gather(1, following))
            else:
                logprobs.append(sums.logprobs(chosen))
            ranks.append((logits > chosen).sum(dim=1, keepdim=True) + 1)
        parts = (
            ids,
            sums.logprobs(logits.gather(1, ids)),
            *logprobs,
            *ranks,
            sums.entropy,
            divergence.clamp(min=0),  # rounding may make it negative
        )
        return torch.cat(parts, dim=1).float()

    def _sums(self, logits: Tensor, probs: Tensor) -> _Sums:
        shifted, exps, products, weighted = self._work[:, : len(logits)]
        largest = logits.amax(dim=1, keepdim=True).double()
        shifted.copy_(logits).sub_(largest)
        torch.exp(shifted, out=exps)
        torch.mul(exps, shifted, out=products)
        torch.mul(probs, shifted, out=weighted)
        sums = self._work[1:, : len(logits)].sum(dim=2, keepdim=True)  # (3, G, 1)
        log_total = sums[0].log()
        return _Sums(largest, log_total, log_total - sums[1] / sums[0], sums[2])


def _ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """Ranks (G, N) of ids (N,) in each row. Ties share the better rank."""
    chosen = logits[:, ids]  # (G, N)
    if len(ids) > COUNTED_IDS:
        ascending = logits.sort(dim=1).values
        return logits.shape[1] - torch.searchsorted(ascending, chosen, right=True) + 1
    ranks = torch.ones(chosen.shape, dtype=torch.int64, device=logits.device)
    for column in range(len(ids)):
        ranks[:, column] += (logits > chosen[:, column : column + 1]).sum(dim=1)
    return ranks


@dataclass(frozen=True, slots=True)
class LensRow:
    """The statistics of a row. Logprobs, entropy and divergence are in nats. Rank 1 is the most
    likely id; ties share the better rank."""

    top_ids: npt.NDArray[np.int64]  # (K,)
    top_logprobs: npt.NDArray[np.float32]  # (K,)
    logprobs: npt.NDArray[np.float32]  # (N,) of the named ids, the following token last
    ranks: npt.NDArray[np.int64]  # (N,)
    entropy: float
    divergence: float


def read_lens(numbers: npt.NDArray[Any], top_k: int, named: int) -> LensRow:
    """Unpack a row (width,) of `LensDigest.numbers`."""
    top, rest = numbers[: 2 * top_k], numbers[2 * top_k :]
    return LensRow(
        top_ids=top[:top_k].astype(np.int64),
        top_logprobs=top[top_k:],
        logprobs=rest[:named],
        ranks=rest[named : 2 * named].astype(np.int64),
        entropy=float(rest[-2]),
        divergence=float(rest[-1]),
    )
