"""Loss: cross-entropy of the head's predictions, a piece of the positions at a time.

The logits of a batch are the largest thing that a step computes: B * T * V numbers, three times
over in float32 when `F.cross_entropy` and its backward pass are done with them. Here a piece of
rows is multiplied by the head, turned into its loss and at once into its gradients, and forgotten:
what is kept is as large as the hidden states and the head themselves.

Covers the mean loss, of a head without bias and without dropout, and one backward pass. Evaluation
does not come here: it wants no gradients (`model/training/step/validate.py`).

Shapes: N = B * T positions, C = d_model, V = vocab_size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE_NUMBERS = {"cpu": 2**21, "cuda": 2**28}
"""Logits of a piece. On a CPU 8 MB in float32, which is near to a processor's cache and is memory
that it takes again for the next piece; on a GPU 1 GB, as each piece goes over the gradient of the
whole head. The latter is chosen, not measured."""
FEWEST_ROWS = 512
"""Of a piece, whatever the vocabulary: the gradient of the whole head is added up once for each."""


def cross_entropy(
    hidden: Tensor,  # (B, T, C)
    head: Tensor,  # (rows, C), rows at least V
    targets: Tensor,  # (B, T)
    *,
    vocab_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The mean of -log p(target) in nats, a float32 scalar with gradients to `hidden` and `head`.

    As `F.cross_entropy` of `F.linear(hidden, head)[..., :vocab_size]` computed in `dtype` and
    widened to float32. Rows of the head from `vocab_size` on take no part and get no gradient.
    """
    loss: Tensor = _PiecewiseCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), head, targets.flatten(), vocab_size, dtype
    )
    return loss


class _PiecewiseCrossEntropy(torch.autograd.Function):
    """The gradient of the logits is softmax - onehot, over N: known as soon as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, C)
        head: Tensor,  # (rows, C)
        targets: Tensor,  # (N,)
        vocab_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        count = len(hidden)
        narrow, weight = hidden.to(dtype), head[:vocab_size].to(dtype)
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(narrow)
        head_gradient = torch.zeros(head.shape, device=head.device)  # float32: a sum of many
        rows = max(FEWEST_ROWS, PIECE_NUMBERS[hidden.device.type] // vocab_size)
        for first in range(0, count, rows):
            piece = narrow[first : first + rows]
            wanted = targets[first : first + rows, None]  # (n, 1)
            logits = F.linear(piece, weight).float()  # (n, V)
            normaliser = logits.logsumexp(dim=-1, keepdim=True)
            total += (normaliser - logits.gather(1, wanted)).sum()
            gradient = logits.sub_(normaliser).exp_()
            gradient.scatter_add_(1, wanted, gradient.new_full((), -1.0).expand(wanted.shape))
            gradient = gradient.div_(count).to(dtype)
            torch.mm(gradient, weight, out=hidden_gradient[first : first + rows])
            head_gradient[:vocab_size] += gradient.T @ piece
        ctx.save_for_backward(hidden_gradient, head_gradient)
        ctx.dtypes = hidden.dtype, head.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        hidden_dtype, head_dtype = ctx.dtypes
        return (
            (of_hidden * gradient).to(hidden_dtype),
            (of_head * gradient).to(head_dtype),
            *(None, None, None),
        )
