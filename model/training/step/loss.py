"""Loss: cross-entropy of the head's predictions, computed in chunks of positions.

The logits of a batch are the largest tensor of a step, with B * T * V elements, and
`F.cross_entropy` with its backward pass holds three such tensors in float32. Here a chunk of rows
is multiplied by the head, its loss and gradients are computed immediately, and the chunk's logits
are dropped. Only the gradients of the hidden states and of the head are kept.

Supports the mean loss of a head with or without a bias, and a single backward pass. Evaluation
needs no gradients (`model/training/step/validate.py`).

Shapes: N = B * T positions, C = d_model, V = vocab_size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**28}
"""Number of logits per chunk. On a CPU they take 8 MB in float32, about the size of a processor's
cache. On a GPU they take 1 GB, so that there are few chunks: each chunk updates the gradient of the
whole head. The value for GPUs was chosen without measurements."""
MIN_ROWS = 512
"""Minimum number of rows of a chunk. It limits the number of chunks, because each chunk updates the
gradient of the whole head."""


def cross_entropy(
    hidden: Tensor,  # (B, T, C)
    head: Tensor,  # (rows, C), rows at least V
    targets: Tensor,  # (B, T)
    *,
    bias: Tensor | None = None,  # (rows,)
    vocab_size: int,
    softcap: float | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """The mean of -log p(target) in nats, a float32 scalar, differentiable with respect to
    `hidden`, `head` and `bias`.

    The same as `F.cross_entropy` of the logits `F.linear(hidden, head, bias)[..., :vocab_size]`.
    The logits are computed in `dtype`, converted to float32, and then limited to `softcap` as in
    `GPT.logits`. Rows of the head from `vocab_size` on are ignored and get no gradient.
    """
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), head, bias, targets.flatten(), vocab_size, softcap, dtype
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, starting from the logits' gradient
    (softmax - onehot) / N."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, C)
        head: Tensor,  # (rows, C)
        bias: Tensor | None,  # (rows,)
        targets: Tensor,  # (N,)
        vocab_size: int,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> Tensor:
        count = len(hidden)
        narrow, weight = hidden.to(dtype), head[:vocab_size].to(dtype)
        added = None if bias is None else bias[:vocab_size].to(dtype)
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(narrow)
        head_gradient = torch.zeros(head.shape, device=head.device)  # float32: a sum of many
        bias_gradient = None if bias is None else torch.zeros(bias.shape, device=bias.device)
        rows = max(MIN_ROWS, CHUNK_LOGITS[hidden.device.type] // vocab_size)
        for first in range(0, count, rows):
            chunk = narrow[first : first + rows]
            chosen = targets[first : first + rows, None]  # (n, 1)
            logits = F.linear(chunk, weight, added).float()  # (n, V)
            slope = None
            if softcap is not None:
                logits = torch.tanh(logits.div_(softcap))
                slope = 1 - logits.square()
                logits = logits.mul_(softcap)
            normalizer = logits.logsumexp(dim=-1, keepdim=True)
            total += (normalizer - logits.gather(1, chosen)).sum()
            gradient = logits.sub_(normalizer).exp_()
            gradient.scatter_add_(1, chosen, gradient.new_full((), -1.0).expand(chosen.shape))
            gradient = gradient.div_(count)
            if slope is not None:
                gradient = gradient.mul_(slope)
            if bias_gradient is not None:
                bias_gradient[:vocab_size] += gradient.sum(dim=0)
            gradient = gradient.to(dtype)
            torch.mm(gradient, weight, out=hidden_gradient[first : first + rows])
            head_gradient[:vocab_size] += gradient.T @ chunk
        ctx.save_for_backward(hidden_gradient, head_gradient, bias_gradient)
        ctx.dtypes = hidden.dtype, head.dtype, None if bias is None else bias.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            None if of_input is None else (of_input * gradient).to(dtype)
            for of_input, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, *(None, None, None, None))
