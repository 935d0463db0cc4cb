"""Attention: what happens between the query, key and value projections and the output projection.

The GPT's forward hands each layer's heads to an `Attend`, and takes back their outputs. The plain
ones are here: the fused causal one of training, and the one that keeps what it computes. Those
that read and write the KV cache are in `model/kv_cache.py`.

Shapes: B sequences, T positions, D = head_dim, S = key positions.
  q (B, n_head, T, D)   k, v (B, n_kv_head, T, D)   result (B, n_head, T, D)
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Attend(Protocol):
    """Attention of one layer: takes new queries, keys and values, returns the heads' outputs."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def attention_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled dot products (B, n_head, T, S); grouped key heads are shared by their queries."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, n_head, S, D)
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def attention_probs(scores: Tensor, *, causal: bool) -> Tensor:
    """Softmax over the keys (B, n_head, T, S); causal: a position sees itself and what precedes.

    The last query is aligned with the last key, so T may be smaller than S.
    """
    if causal:
        t, s = scores.shape[-2:]
        visible = torch.ones(t, s, dtype=torch.bool, device=scores.device).tril(s - t)
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(dim=-1)


class CausalAttend:
    """Causal attention within the given positions, in one fused kernel; nothing is kept."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


class RecordingAttend:
    """Causal attention spelled out, keeping each layer's q, k, v, scores and probs in lists.

    For inspection: memory grows with n_layer * T * T. Scores are those before the causal mask.
    """

    def __init__(self) -> None:
        self.q: list[Tensor] = []
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.probs: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = attention_scores(q, k)
        probs = attention_probs(scores, causal=True)
        for kept, value in zip(
            (self.q, self.k, self.v, self.scores, self.probs),
            (q, k, v, scores, probs),
            strict=True,
        ):
            kept.append(value)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, n_head, T, D)
        return probs @ v
