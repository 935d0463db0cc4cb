"""PlainDecoder: prompts and decode steps in plain torch, on any device; the reference for the other
decoders.

The rows of a step are padded, and a large step is divided into groups of rows, so that the
arithmetic of a row does not depend on the size of the batch (`row_groups.py`).
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.inference.kernels.base import Decoder, DecodeRows, Prefilled, PrefillInput
from logitd.model.inference.kernels.eager.prefill import TorchPrefill
from logitd.model.inference.kernels.eager.row_groups import RowGroups, decode_row_groups
from logitd.model.inference.kv_cache import KVCache
from logitd.model.transformer.attention import Attend
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.tap import UNTAPPED, Tap


class PlainDecoder(Decoder):
    """Computes a GPT on its KV cache, one torch operation at a time."""

    def __init__(self, gpt: GPT, cache: KVCache, *, row_groups: RowGroups | None = None) -> None:
        """`row_groups` replaces the groups that `decode_row_groups` finds."""
        self._gpt = gpt
        self._cache = cache
        self._prefill = TorchPrefill(gpt, cache)
        self._given = row_groups

    @cached_property
    def _row_groups(self) -> RowGroups:
        return self._given or decode_row_groups(self._gpt)

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        return self._prefill(pieces)

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        parts = []
        for part in self._row_groups.parts(len(token_ids)):
            rows = token_ids[part], slots[part], positions[part]
            padding = self._row_groups.padding(len(slots[part]))
            attend = self._cache.decode(slots[part], positions[part])
            parts.append(step_logits(self._gpt, self._cache, rows, attend, padding=padding))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def head(self, hidden: Tensor) -> Tensor:
        return grouped_logits(self._gpt, hidden, self._row_groups)


def step_logits(
    gpt: GPT,
    cache: KVCache,
    rows: DecodeRows,
    attend: Attend,
    *,
    padding: int,
    tap: Tap = UNTAPPED,
) -> Tensor:
    """Logits (B, V) of a decode step, computed with `padding` additional rows."""
    device, zeros = gpt.token_embedding.weight.device, [0] * padding
    token_ids, slots, positions = rows
    previous = cache.put_token_ids(token_ids, slots, positions)
    ids = torch.tensor([*token_ids, *zeros], device=device)
    position_ids = torch.tensor([*positions, *zeros], device=device)
    hidden = gpt.transform(
        ids[:, None],
        position_ids[:, None],
        attend,
        tap=tap,
        previous_ids=None if previous is None else F.pad(previous, (0, padding))[:, None],
    )  # (B padded, 1, d_model)
    return gpt.logits(hidden)[: len(token_ids), 0]


def grouped_logits(gpt: GPT, hidden: Tensor, row_groups: RowGroups) -> Tensor:
    """Logits (R, V) of hidden states (R, d_model), computed in the row groups of decode steps."""
    parts = []
    for part in row_groups.parts(len(hidden)):
        rows = hidden[part]
        padded = F.pad(rows, (0, 0, 0, row_groups.padding(len(rows))))
        parts.append(gpt.logits(padded[:, None])[: len(rows), 0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
