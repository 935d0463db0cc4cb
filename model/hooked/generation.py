"""Generation by a hooked GPT, with the hooks in place. The whole text is computed again for each
new token.

`LLM.generate` is many times faster. Tokens are sampled with torch's global random generator.

Shapes: B sequences, T positions, V = vocab_size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from logitd.model.hooked.tokens import Batch


@torch.no_grad()
def continued(
    logits: Callable[[Batch], Tensor],
    batch: Batch,
    tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    ends: Sequence[int],
    context: int,
) -> Tensor:
    """The ids of the batch and of its continuations (B, T + tokens); fewer columns if all sequences
    end earlier. A sequence that has ended is filled with the first of `ends`. Each row of the batch
    is padded at its beginning. At temperature 0 or below, each token is the likeliest; otherwise it
    is sampled from the `top_k` likeliest (None: all)."""
    ids, real = batch.ids, batch.real
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(tokens):
        row = logits(Batch(ids[:, -context:], real[:, -context:]))[:, -1]
        new = _chosen(row, temperature, top_k)
        if ends:
            new = torch.where(ended, ends[0], new)
            ended |= torch.isin(new, torch.tensor(ends, device=ids.device))
        ids = torch.cat((ids, new[:, None]), dim=1)
        real = torch.cat((real, torch.ones_like(real[:, :1])), dim=1)
        if ends and ended.all():
            break
    return ids


def _chosen(row: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """The token (B,) chosen from each row of logits (B, V)."""
    if temperature <= 0:
        return row.argmax(dim=-1)
    row = row / temperature
    if top_k is not None:
        least = row.topk(top_k).values[:, -1:]
        row = row.masked_fill(row < least, float("-inf"))
    return torch.multinomial(row.softmax(dim=-1), 1)[:, 0]
