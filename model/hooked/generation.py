"""Generation by a hooked GPT, with the hooks in place: the whole text is computed for each token.

`LLM.generate` is many times faster. Random numbers are torch's.

Shapes: B sequences, T positions, V = vocab_size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from logitd.model.hooked.tokens import Batch


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of a token: the likeliest one, or a random one of the `top_k` likeliest."""

    do_sample: bool
    top_k: int | None
    temperature: float


@torch.no_grad()
def continued(
    logits: Callable[[Batch], Tensor],
    batch: Batch,
    tokens: int,
    sampling: Sampling,
    *,
    ends: Sequence[int],
    context: int,
) -> Tensor:
    """Ids (B, T + tokens), or fewer if all sequences have ended. A sequence that has ended is
    filled with the first of `ends`. Padding comes first in each row."""
    ids, real = batch.ids, batch.real
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(tokens):
        row = logits(Batch(ids[:, -context:], real[:, -context:]))[:, -1]
        new = _chosen(row, sampling)
        if ends:
            new = torch.where(ended, ends[0], new)
            ended |= torch.isin(new, torch.tensor(ends, device=ids.device))
        ids = torch.cat((ids, new[:, None]), dim=1)
        real = torch.cat((real, torch.ones_like(real[:, :1])), dim=1)
        if ends and ended.all():
            break
    return ids


def _chosen(row: Tensor, sampling: Sampling) -> Tensor:
    """A token (B,) of each row of logits (B, V)."""
    if not sampling.do_sample or sampling.temperature <= 0:
        return row.argmax(dim=-1)
    row = row / sampling.temperature
    if sampling.top_k is not None:
        least = row.topk(sampling.top_k).values[:, -1:]
        row = row.masked_fill(row < least, float("-inf"))
    return torch.multinomial(row.softmax(dim=-1), 1)[:, 0]
