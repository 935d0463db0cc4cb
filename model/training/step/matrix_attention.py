"""Matrix attention: causal attention as batched matrix products, for training on a CPU.

In bfloat16, torch's fused kernel takes about twice as long, forward and backward, as two products
with a softmax between them; in float32 it is slower with dropout and with sliding windows. Queries
are processed in blocks. A block uses the keys from the first one visible to its first query up to
the end of the block, so most masked positions are never computed. In a context of 512 positions,
this takes three fifths of the time of attention without blocks. The cost is memory: the attention
weights of every head and layer are kept for the backward pass.

Shapes: B sequences, H query heads, K key/value heads, G = H / K, T positions, D head width; a block
is positions [a, e).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitd.model.transformer.attention import causal_bias, first_visible

QUERIES = 128
"""Positions per block. Blocks of 64 and of 256 positions were slower, in windows of 256 and of 512
positions."""


class MatrixAttend:
    """An `Attend` (`model/transformer/attention.py`) that computes in `dtype`."""

    def __init__(self, dtype: torch.dtype, dropout: float = 0.0) -> None:
        self.dtype = dtype
        self.dropout = dropout

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
    ) -> Tensor:
        b, h, t, d = q.shape
        kv = k.shape[1]
        groups = h // kv
        # Queries that share a key head are adjacent, so keys need no copies. Positions are the
        # outer axis, so that a block of positions is contiguous in memory.
        q = q.to(self.dtype).view(b, kv, groups, t, d).transpose(2, 3)  # (B, K, T, G, D)
        k, v = k.to(self.dtype), v.to(self.dtype)
        with torch.autocast(q.device.type, enabled=False):  # it would change dtypes
            out: Tensor = _BlockedAttention.apply(  # type: ignore[no-untyped-call]
                q.reshape(b * kv, t * groups, d),
                k.reshape(b * kv, t, d),
                v.reshape(b * kv, t, d),
                groups,
                window,
                self.dropout,
            )  # (B * K, T * G, D)
        return out.view(b, kv, t, groups, d).transpose(2, 3).reshape(b, h, t, d)


class _BlockedAttention(torch.autograd.Function):
    """softmax(q k' / sqrt(D)) v, computed in blocks, with explicit gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # (B * K, T * G, D)
        k: Tensor,  # (B * K, T, D)
        v: Tensor,
        groups: int,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        out = torch.empty_like(q)
        kept: list[Tensor] = []
        for a, e in _blocks(k.shape[1]):
            rows, seen = slice(a * groups, e * groups), slice(first_visible(a, window), e)
            mask = causal_bias(e - a, e - seen.start, q, window).repeat_interleave(groups, dim=0)
            mask = mask.expand(len(q), -1, -1)
            scores = torch.baddbmm(mask, q[:, rows], k[:, seen].mT, alpha=q.shape[-1] ** -0.5)
            probs = scores.softmax(dim=-1)  # (B * K, (e - a) * G, keys)
            kept.append(probs)
            if dropout:
                # 0 for dropped probabilities, the usual scale for the others.
                factor = F.dropout(torch.ones_like(probs), dropout)
                kept.append(factor)
                probs = probs * factor
            torch.bmm(probs, v[:, seen], out=out[:, rows])
        ctx.save_for_backward(q, k, v, *kept)
        ctx.groups, ctx.window, ctx.dropout = groups, window, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        of_q = torch.empty_like(q)
        # Several blocks attend to a key: their gradients are added up in float32.
        of_k, of_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v).float()
        saved = iter(kept)
        for a, e in _blocks(k.shape[1]):
            rows, seen = (
                slice(a * ctx.groups, e * ctx.groups),
                slice(first_visible(a, ctx.window), e),
            )
            probs = next(saved)
            factor = next(saved) if ctx.dropout else None
            above = gradient[:, rows]  # (B * K, (e - a) * G, D)
            used = probs if factor is None else probs * factor
            of_v[:, seen] += used.mT @ above
            of_probs = above @ v[:, seen].mT
            if factor is not None:
                of_probs *= factor
            of_scores = torch._softmax_backward_data(of_probs, probs, -1, probs.dtype)
            torch.bmm(of_scores, k[:, seen], out=of_q[:, rows])
            of_k[:, seen] += of_scores.mT @ q[:, rows]
        return of_q.mul_(scale), of_k.mul_(scale).to(k.dtype), of_v.to(v.dtype), None, None, None


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(a, min(a + QUERIES, length)) for a in range(0, length, QUERIES)]
