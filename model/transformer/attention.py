"""Attention: computes the outputs of the heads from queries, keys and values. `gpt.py` has the
projections before and after it.

A GPT passes the queries, keys and values of each layer to an `Attend`, which returns the outputs of
the heads. This module defines the `Attend`s without a cache: a fused one for training, and one that
keeps its results for `model/transformer/trace.py`. `model/inference/kv_cache.py` defines the
`Attend`s that use the KV cache; its prefill calls `attend_blocks` and `attend_piece`.

Shapes: B sequences, T positions, H = n_head, K = n_kv_head, D = head_dim, S = key positions.
  q (B, H, T, D)   k, v (B, K, T, D)   result (B, H, T, D)
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.transformer.config import BLOCK


class Attend(Protocol):
    """Attention of one layer: maps the new queries, keys and values to the outputs of the heads.
    `window` is the number of positions that a query sees, including its own; None: all."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
    ) -> Tensor: ...


class Observer(Protocol):
    """Called with each block of queries (1, H, BLOCK, D), all keys (1, K, S, D) up to the block's
    end, and the window."""

    def __call__(self, layer: int, q: Tensor, keys: Tensor, window: int | None) -> None: ...


def attention_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled dot products (B, H, T, S) of queries and keys. Each group of query heads shares a key
    head."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def attention_probs(scores: Tensor, window: int | None = None) -> Tensor:
    """Softmax over the visible keys (B, H, T, S). A position sees itself and the positions before
    it, at most `window` in all. The last query and the last key have the same position; T may be
    smaller than S.
    """
    return mask_causal(scores, window).softmax(dim=-1)


def mask_causal(scores: Tensor, window: int | None = None) -> Tensor:
    """The scores (B, H, T, S), with -inf for each key that the query does not see. The last query
    and the last key have the same position."""
    t, s = scores.shape[-2:]
    return scores.masked_fill(~visible_keys(t, s, scores.device, window), float("-inf"))


def visible_keys(
    queries: int, keys: int, device: torch.device, window: int | None = None
) -> Tensor:
    """The mask (queries, keys) of the keys that each query sees: the keys at its own position and
    at the positions before it, at most `window` in all. The last query and the last key have the
    same position, so the last n columns are the mask for n keys."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return visible if window is None else visible.triu(keys - queries - window + 1)


def attend_blocks(
    layer: int,
    q: Tensor,  # (1, H, T, D), T a multiple of BLOCK
    keys: Tensor,  # (K, S, D), including the keys of the queries' positions
    values: Tensor,
    *,
    start: int,
    mask: Tensor,  # (BLOCK, any length from S on): `visible_keys` of a block
    window: int | None = None,
    observe: Observer | None = None,
) -> Tensor:
    """Causal attention (1, H, T, D) of whole blocks of queries, the first at position `start`.

    Each block attends over exactly the keys from the first visible key up to the end of the block.
    So the arithmetic of a row depends only on its position, not on the number of positions in the
    call.
    """
    blocks = []
    for offset in range(0, q.shape[2], BLOCK):
        end = start + offset + BLOCK
        queries, seen = q[:, :, offset : offset + BLOCK], keys[None, :, :end]
        if observe is not None:
            observe(layer, queries, seen, window)
        first = first_visible(start + offset, window)
        blocks.append(
            F.scaled_dot_product_attention(
                queries,
                seen[:, :, first:],
                values[None, :, first:end],
                attn_mask=mask[:, mask.shape[1] - (end - first) :],
                enable_gqa=q.shape[1] != keys.shape[0],
            )
        )
    return torch.cat(blocks, dim=2)


def first_visible(position: int, window: int | None) -> int:
    """The first position that a query at this position sees."""
    return 0 if window is None else max(0, position - window + 1)


def attend_apart(attends: Sequence[Attend], lengths: Sequence[int]) -> Attend:
    """Attention for several texts that are concatenated along T. `lengths` has the number of
    positions of each text. Each text has its own `Attend`."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        # q (1, H, T, D), k and v (1, K, T, D)
        texts = (tensor.split(list(lengths), dim=2) for tensor in (q, k, v))
        parts = zip(attends, *texts, strict=True)
        return torch.cat([own(layer, q, k, v, window) for own, q, k, v in parts], dim=2)

    return attend


def causal_bias(length: int, keys: int, like: Tensor, window: int | None = None) -> Tensor:
    """A bias (length, keys) for the scores of queries at the last `length` of `keys` positions: 0
    for keys that a query sees, otherwise -inf. It has the dtype and device of `like`, the queries,
    as kernels require."""
    visible = visible_keys(length, keys, like.device, window)
    return like.new_zeros(length, keys).masked_fill_(~visible, -math.inf)


def attend_piece(
    q: Tensor,  # (1, H, T, D)
    keys: Tensor,  # (K, S, D); the last T belong to the queries' positions
    values: Tensor,
    bias: Tensor | None,  # (T, S); None if the queries are all positions
) -> Tensor:
    """Causal attention (1, H, T, D) of a piece of a prompt in one operation.

    It is meant for devices that would compute single blocks faster than the host can launch them.
    The last bits of a row depend on the piece that contains it.
    """
    key_heads, length, width = keys.shape
    # Most kernels accept no bias for grouped heads. So the G queries that share a key head are put
    # next to each other, and the key head is repeated for them: (K, G, ., D).
    queries = q.reshape(key_heads, -1, q.shape[2], width)
    keys, values = (
        cells[:, None].expand(key_heads, queries.shape[1], length, width)
        for cells in (keys, values)
    )
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=bias, is_causal=bias is None
    )
    return out.reshape(q.shape)


class CausalAttend:
    """Causal attention among the positions of the call, in one fused kernel."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
    ) -> Tensor:
        length = q.shape[2]
        mask = None if window is None else visible_keys(length, length, q.device, window)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )


class AttentionRecorder:
    """An observer that keeps the attention weights of some layers and heads, for one sequence.

    `rows` returns the weights of all positions so far (positions, layers, heads, length). Keys that
    a position does not see have the weight 0.
    """

    def __init__(self, layers: Sequence[int], heads: Sequence[int], length: int) -> None:
        self._layers, self._heads, self._length = tuple(layers), list(heads), length
        self._blocks: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def __call__(self, layer: int, q: Tensor, keys: Tensor, window: int | None) -> None:
        if layer not in self._blocks:
            return
        group = q.shape[1] // keys.shape[1]
        keys = keys[:, [head // group for head in self._heads]]  # (1, heads, S, D)
        probs = attention_probs(attention_scores(q[:, self._heads], keys), window)
        # (heads, BLOCK, S), then (BLOCK, heads, length)
        probs = F.pad(probs[0], (0, max(0, self._length - probs.shape[-1])))[..., : self._length]
        self._blocks[layer].append(probs.transpose(0, 1))

    def rows(self) -> Tensor:
        per_layer = [torch.cat(self._blocks[layer]) for layer in self._layers]
        return torch.stack(per_layer, dim=1)  # (positions, layers, heads, length)


class RecordingAttend:
    """Causal attention that records the scores of each layer, without the mask, and the attention
    weights. For inspection: its memory grows with n_layer * T * T."""

    def __init__(self) -> None:
        self.scores: list[Tensor] = []
        self.probs: list[Tensor] = []

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
    ) -> Tensor:
        scores = attention_scores(q, k)
        probs = attention_probs(scores, window)
        self.scores.append(scores)
        self.probs.append(probs)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, T, D)
        return probs @ v
