"""Prefill: positions of a prompt into their slot, by torch.

Runs in whole blocks of 32 positions at multiples of 32, so that the arithmetic of a row depends on
its position only. Whoever computes prompts in another way
(`model/inference/kernels/cpu/decoder.py`) takes and gives the same.

Shapes: T positions of a chunk.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from model.inference.kernels.base import Prefilled, PrefillInput
from model.inference.kernels.eager.contention import ContentionMonitor
from model.inference.kv_cache import KVCache
from model.transformer.attention import Attend, AttentionRecorder
from model.transformer.config import BLOCK
from model.transformer.gpt import GPT


class TorchPrefill:
    """Prompts of a GPT into the slots of its cache, one torch operation after the other.

    `blockwise`: a block at a time, for batch invariance where the kernel of a product depends on
    the number of rows (a GPU). `at_once`: attention too in one operation, for speed there.
    """

    def __init__(
        self, gpt: GPT, cache: KVCache, *, blockwise: bool = False, at_once: bool = False
    ) -> None:
        assert not (blockwise and at_once)
        self._gpt = gpt
        self._cache = cache
        self._blockwise = blockwise
        self._at_once = at_once
        self._contention = ContentionMonitor(gpt)

    def __call__(self, chunk: PrefillInput, *, contended: bool = False) -> Prefilled:
        """`contended`: other processes are known to hold the cores."""
        start, weights = chunk.start, chunk.weights
        assert start % BLOCK == 0
        device, length = self._gpt.token_embedding.weight.device, len(chunk.token_ids)
        padding = -length % BLOCK
        # The padding's keys lie behind every position that is ever looked at before it is
        # overwritten; its own results are dropped.
        ids = torch.tensor([[*chunk.token_ids, *[0] * padding]], device=device)
        positions = torch.arange(start, start + length + padding, device=device)
        positions = positions.clamp(max=self._gpt.config.context_length - 1)[None]
        recorder = None
        if weights is not None:
            recorder = AttentionRecorder(weights.layers, weights.heads, weights.length)
        width = BLOCK if self._blockwise else length + padding
        parts: list[Tensor] = []  # (1, width, d_model) each
        collected: list[list[Tensor]] = []
        for offset in range(0, length + padding, width):
            part = slice(offset, offset + width)
            kept: list[Tensor] | None = [] if chunk.states else None
            attend = self._attend(chunk.slot, start + offset, recorder)
            with self._contention.watched(width, contended):
                hidden = self._gpt.transform(ids[:, part], positions[:, part], attend, kept)
            parts.append(hidden)
            if kept is not None:
                collected.append(kept)
        layers = [_joined(layer)[0, :length] for layer in zip(*collected, strict=True)]
        return Prefilled(
            hidden=_joined(parts)[0, :length],
            states=torch.stack(layers) if chunk.states else None,
            weights=None if recorder is None else recorder.rows()[:length],
        )

    def _attend(self, slot: int, start: int, recorder: AttentionRecorder | None) -> Attend:
        if self._at_once and recorder is None:
            return self._cache.prefill_at_once(slot, start)
        return self._cache.prefill(slot, start, recorder)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Parts (1, T, d_model) as one; a single one as it is."""
    together = list(parts)
    return together[0] if len(together) == 1 else torch.cat(together, dim=1)
