"""TappedDecoder: prompts and decode steps in plain torch, with a tap on every stage.

It computes sequences whose stages are recorded or changed; another decoder computes all others on
the same cache. It uses the same blocks and row groups as `TorchPrefill` and `PlainDecoder`, and its
results have the same bits as theirs if nothing is changed. If a tap asks for attention scores or
weights, they are computed separately from the fused kernel. The fused kernel's result is still used
unless the tap changes the scores or weights.

On a GPU a row's bits depend on the number of rows. There prompts are computed one block at a time,
and decode steps one row at a time, so that the bits are the same in any batch.

Shapes: T positions of a piece, H = n_head, K = n_kv_head, D = head_dim, S = key positions.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from logitd.model.inference.kernels.eager.decoder import step_logits
from logitd.model.inference.kernels.eager.prefill import PaddedPiece
from logitd.model.inference.kernels.eager.row_groups import (
    RowGroups,
    decode_row_groups,
    prefill_rows,
)
from logitd.model.inference.kernels.eager.taps import Changes, PieceTap, Readers, RowTaps
from logitd.model.inference.kv_cache import KVCache
from logitd.model.transformer.attention import Attend, attention_scores, mask_causal
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT

ONE_OF_FOUR = RowGroups(multiple=4, most=1)
"""Row groups on a GPU: each row is computed separately, padded to four rows."""


class TappedDecoder:
    """Computes tapped sequences of a GPT on a KV cache that another decoder also uses."""

    def __init__(self, gpt: GPT, cache: KVCache, readers: Readers) -> None:
        self._readers = readers
        self._gpt = gpt
        self._cache = cache
        self._on_cpu = gpt.token_embedding.weight.device.type == "cpu"

    @cached_property
    def _row_groups(self) -> RowGroups:
        return decode_row_groups(self._gpt) if self._on_cpu else ONE_OF_FOUR

    @cached_property
    def _prefill_rows(self) -> int:
        return prefill_rows(self._gpt) if self._on_cpu else BLOCK

    def prefill(self, token_ids: Sequence[int], slot: int, start: int, tap: PieceTap) -> Tensor:
        """Compute a piece of a prompt into its slot, which already holds the positions before
        `start`, a multiple of BLOCK. Returns final hidden states (T, d_model)."""
        piece = PaddedPiece.of(self._gpt, self._cache, token_ids, slot, start)
        width = self._prefill_rows
        parts = []
        for offset in range(0, piece.length, width):
            shifted = _Shifted(tap, offset)
            attend = self._attend_piece(slot, start + offset, shifted)
            part = piece[offset : offset + width]
            parts.append(part.transform(self._gpt, attend, tap=shifted))
        return torch.cat(parts, dim=1)[0, : len(token_ids)]

    def decode(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        changes: Sequence[Changes],
    ) -> Tensor:
        """Logits (B, V) after the tokens. Each row belongs to a different sequence, whose `changes`
        are applied."""
        parts = []
        for rows in self._row_groups.parts(len(token_ids)):
            row_changes = list(zip(changes[rows], positions[rows], strict=True))
            taps = RowTaps(row_changes, self._readers)
            attend = self._attend_rows(slots[rows], positions[rows], taps)
            padding = self._row_groups.padding(len(slots[rows]))
            step = token_ids[rows], slots[rows], positions[rows]
            parts.append(
                step_logits(self._gpt, self._cache, step, attend, padding=padding, tap=taps)
            )
        return torch.cat(parts)

    def _attend_piece(self, slot: int, start: int, tap: "_Shifted") -> Attend:
        """Attend like `KVCache.prefill`, with a tap on attention scores and weights."""
        fused = self._cache.prefill(slot, start)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
        ) -> Tensor:
            # (1, H, T, D); keys and values are in the cache now
            out = fused(layer, q, k, v, window)
            if not _wants_weights(tap, layer):
                return out
            keys, values = self._cache.read(layer, slot, start + q.shape[2])  # (K, end, D) each
            blocks = []
            for offset in range(0, q.shape[2], BLOCK):
                rows = slice(offset, offset + BLOCK)
                end = start + offset + BLOCK
                seen = keys[None, :, :end], values[None, :, :end]
                weighted = _weighted(tap, layer, q[:, :, rows], *seen, window, offset)
                blocks.append(out[:, :, rows] if weighted is None else weighted)
            return torch.cat(blocks, dim=2)

        return attend

    def _attend_rows(self, slots: Sequence[int], positions: Sequence[int], taps: RowTaps) -> Attend:
        """Attend like `KVCache.decode`, with taps on attention scores and weights."""
        fused = self._cache.decode(slots, positions)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
        ) -> Tensor:
            out = fused(layer, q, k, v, window)  # (B, H, 1, D)
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
                tap = taps.row(row)
                if _wants_weights(tap, layer):
                    keys, values = self._cache.read(layer, slot, position + 1)
                    weighted = _weighted(
                        tap, layer, q[row : row + 1], keys[None], values[None], window, 0
                    )  # (1, H, 1, D)
                    if weighted is not None:
                        out[row] = weighted[0]
            return out

        return attend


class _Shifted:
    """Adapts the tap of a piece to the part of the piece that begins at `offset`."""

    def __init__(self, tap: PieceTap, offset: int) -> None:
        self._tap = tap
        self._offset = offset

    def wants(self, layer: int | None, stage: str) -> bool:
        return self._tap.wants(layer, stage)

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        return self._tap(layer, stage, value, self._offset + offset)


def _wants_weights(tap: PieceTap | _Shifted, layer: int) -> bool:
    return tap.wants(layer, "attention.scores") or tap.wants(layer, "attention.probs")


def _weighted(
    tap: PieceTap | _Shifted,
    layer: int,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    offset: int,
) -> Tensor | None:
    """Pass the scores and weights of queries (1, H, T, D) over keys (1, K, S, D) to a tap. The last
    key has the position of the last query. Returns the weighted values (1, H, T, D) if the tap
    changed something, else None."""
    scores = mask_causal(attention_scores(q, keys), window)  # (1, H, T, S)
    shown_scores = tap(layer, "attention.scores", scores, offset)
    probs = shown_scores.softmax(dim=-1)
    shown_probs = tap(layer, "attention.probs", probs, offset)
    if shown_scores is scores and shown_probs is probs:
        return None
    values = values.repeat_interleave(q.shape[1] // values.shape[1], dim=1)  # (1, H, S, D)
    return shown_probs @ values
