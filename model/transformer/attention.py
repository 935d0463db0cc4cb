"""Attention: what happens between the query, key and value projections and the output projection.

The GPT's forward hands each layer's heads to an `Attend`, and takes back their outputs. Those that
look at no cache are here: the fused causal one of training, and the one that keeps what it computes
for `model/transformer/trace.py`. Those that read and write the KV cache are in
`model/inference/kv_cache.py`; `attend_blocks` and `attend_piece` are how prefill attends there.

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
    """Attention of one layer: takes new queries, keys and values, returns the heads' outputs."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Observer(Protocol):
    """Is shown each block of queries (1, H, BLOCK, D) with all keys (1, K, S, D) up to its end."""

    def __call__(self, layer: int, q: Tensor, keys: Tensor) -> None: ...


def attention_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled dot products (B, H, T, S); grouped key heads are shared by their queries."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def attention_probs(scores: Tensor, *, causal: bool) -> Tensor:
    """Softmax over the keys (B, H, T, S); causal: a position sees itself and what precedes.

    The last query is aligned with the last key, so T may be smaller than S.
    """
    return (mask_causal(scores) if causal else scores).softmax(dim=-1)


def mask_causal(scores: Tensor) -> Tensor:
    """Scores (B, H, T, S) with -inf for keys behind their query; the last query is aligned with the
    last key."""
    t, s = scores.shape[-2:]
    visible = torch.ones(t, s, dtype=torch.bool, device=scores.device).tril(s - t)
    return scores.masked_fill(~visible, float("-inf"))


def block_mask(length: int, device: torch.device) -> Tensor:
    """Which of `length` keys the rows of the last block of queries see (BLOCK, length).

    Row i sees all keys but the last BLOCK - 1 - i: sliced from the right, this one mask serves a
    block at any position.
    """
    return torch.ones(BLOCK, length, dtype=torch.bool, device=device).tril(length - BLOCK)


def attend_blocks(
    layer: int,
    q: Tensor,  # (1, H, T, D), T a multiple of BLOCK
    keys: Tensor,  # (K, S, D), those of the queries' own positions included
    values: Tensor,
    *,
    start: int,
    mask: Tensor,
    observe: Observer | None = None,
) -> Tensor:
    """Causal attention of whole blocks of queries, the first at position `start`: (1, H, T, D).

    Block by block over exactly the keys up to the block's end, so that a row's arithmetic depends
    on its position alone, not on how many positions are computed with it.
    """
    blocks = []
    for offset in range(0, q.shape[2], BLOCK):
        end = start + offset + BLOCK
        queries, visible = q[:, :, offset : offset + BLOCK], keys[None, :, :end]
        if observe is not None:
            observe(layer, queries, visible)
        blocks.append(
            F.scaled_dot_product_attention(
                queries,
                visible,
                values[None, :, :end],
                attn_mask=mask[:, mask.shape[1] - end :],
                enable_gqa=q.shape[1] != keys.shape[0],
            )
        )
    return torch.cat(blocks, dim=2)


def attend_apart(attends: Sequence[Attend], lengths: Sequence[int]) -> Attend:
    """Attention of several texts that stand one after the other in T, so many positions of each:
    each by its own."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # q (1, H, T, D), k and v (1, K, T, D): a part of T of each text
        parts = zip(*(tensor.split(list(lengths), dim=2) for tensor in (q, k, v)), strict=True)
        return torch.cat(
            [own(layer, *part) for own, part in zip(attends, parts, strict=True)], dim=2
        )

    return attend


def causal_bias(length: int, keys: int, like: Tensor) -> Tensor:
    """What is added to the scores of the last `length` of `keys` positions (length, keys): -inf for
    keys behind a query. In the dtype and on the device of `like`, as kernels take it."""
    hidden = torch.ones(length, keys, dtype=torch.bool, device=like.device).triu(keys - length + 1)
    return like.new_zeros(length, keys).masked_fill_(hidden, -math.inf)


def attend_piece(
    q: Tensor,  # (1, H, T, D)
    keys: Tensor,  # (K, S, D), those of the queries' own positions the last
    values: Tensor,
    bias: Tensor | None,  # (T, S); None where the queries are all positions there are
) -> Tensor:
    """Causal attention of a piece of a prompt in one operation: (1, H, T, D).

    For a device that computes blocks faster than a host can ask for them. The bits of a row depend
    on the piece that it is in.
    """
    key_heads, length, width = keys.shape
    # Queries that share a key head beside each other, the key head for all of them: (K, G, ., D).
    # Told as grouped heads, most kernels would not take a bias.
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
    """Causal attention within the given positions, in one fused kernel; nothing is kept."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


class AttentionRecorder:
    """An observer that keeps the attention weights of some layers and heads.

    `rows` gives those of all positions seen since it was made: (positions, layers, heads, length)
    for one sequence, the weights of keys that a position does not see being 0.
    """

    def __init__(self, layers: Sequence[int], heads: Sequence[int], length: int) -> None:
        self._layers, self._heads, self._length = tuple(layers), list(heads), length
        self._blocks: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def __call__(self, layer: int, q: Tensor, keys: Tensor) -> None:
        if layer not in self._blocks:
            return
        group = q.shape[1] // keys.shape[1]
        keys = keys[:, [head // group for head in self._heads]]  # (1, heads, S, D)
        probs = attention_probs(attention_scores(q[:, self._heads], keys), causal=True)
        # (heads, BLOCK, S), then (BLOCK, heads, length)
        probs = F.pad(probs[0], (0, max(0, self._length - probs.shape[-1])))[..., : self._length]
        self._blocks[layer].append(probs.transpose(0, 1))

    def rows(self) -> Tensor:
        per_layer = [torch.cat(self._blocks[layer]) for layer in self._layers]
        return torch.stack(per_layer, dim=1)  # (positions, layers, heads, length)


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
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, T, D)
        return probs @ v
