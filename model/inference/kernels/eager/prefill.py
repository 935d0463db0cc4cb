"""Prefill: positions of prompts into their slots, by torch.

Runs in whole blocks of 32 positions at multiples of 32, so that the arithmetic of a row depends on
its position only. So the blocks of several prompts share products, where a product may have several
of them (`row_groups.py`). Whoever computes prompts in another way
(`model/inference/kernels/cpu/decoder.py`) takes and gives the same.

Shapes: T positions of a piece, N of several, one after the other and each padded to whole blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from logitd.model.inference.kernels.base import Prefilled, PrefillInput
from logitd.model.inference.kernels.eager.contention import ContentionMonitor
from logitd.model.inference.kernels.eager.row_groups import prefill_rows
from logitd.model.inference.kv_cache import KVCache
from logitd.model.transformer.attention import Attend, AttentionRecorder, attend_apart
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT


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

    def __call__(
        self, pieces: Sequence[PrefillInput], *, contended: bool = False
    ) -> list[Prefilled]:
        """`contended`: other processes are known to hold the cores."""
        results = list[Prefilled]()
        for few in self._sharing_products(pieces):
            alone = len(few) == 1
            results += [self._alone(few[0], contended)] if alone else self._together(few, contended)
        return results

    @cached_property
    def _rows(self) -> int:
        """Positions that may share a product."""
        return BLOCK if self._blockwise else prefill_rows(self._gpt)

    def _sharing_products(self, pieces: Sequence[PrefillInput]) -> Iterator[list[PrefillInput]]:
        """Pieces in their order, those together that are computed together."""
        few, rows = list[PrefillInput](), 0
        for piece in pieces:
            length = _padded_length(piece)
            if few and (self._at_once or rows + length > self._rows):
                yield few
                few, rows = [], 0
            few.append(piece)
            rows += length
        yield few

    def _together(self, pieces: Sequence[PrefillInput], contended: bool) -> list[Prefilled]:
        assert all(piece.plain for piece in pieces)
        lengths = [_padded_length(piece) for piece in pieces]
        ids, positions = zip(*map(self._padded, pieces), strict=True)
        attend = attend_apart(
            [self._cache.prefill(piece.slot, piece.start) for piece in pieces], lengths
        )
        with self._contention.watched(sum(lengths), contended):
            hidden = self._gpt.transform(_joined(ids), _joined(positions), attend)
        parts = hidden[0].split(lengths)  # (N, d_model) to (T padded, d_model) each
        return [
            Prefilled(part[: len(piece.token_ids)])
            for piece, part in zip(pieces, parts, strict=True)
        ]

    def _padded(self, piece: PrefillInput) -> tuple[Tensor, Tensor]:
        """Ids and positions of whole blocks, (1, T padded) each. The padding's keys lie behind
        every position that is ever looked at before it is overwritten; its own results are
        dropped."""
        start, length = piece.start, _padded_length(piece)
        assert start % BLOCK == 0
        device = self._gpt.token_embedding.weight.device
        padding = [0] * (length - len(piece.token_ids))
        ids = torch.tensor([[*piece.token_ids, *padding]], device=device)
        positions = torch.arange(start, start + length, device=device)
        return ids, positions.clamp(max=self._gpt.config.context_length - 1)[None]

    def _alone(self, piece: PrefillInput, contended: bool) -> Prefilled:
        start, weights = piece.start, piece.weights
        length, padded = len(piece.token_ids), _padded_length(piece)
        ids, positions = self._padded(piece)
        recorder = None
        if weights is not None:
            recorder = AttentionRecorder(weights.layers, weights.heads, weights.length)
        width = padded if self._at_once else self._rows
        parts: list[Tensor] = []  # (1, width, d_model) each
        collected: list[list[Tensor]] = []
        for offset in range(0, padded, width):
            part = slice(offset, offset + width)
            kept: list[Tensor] | None = [] if piece.states else None
            attend = self._attend(piece.slot, start + offset, recorder)
            with self._contention.watched(width, contended):
                hidden = self._gpt.transform(ids[:, part], positions[:, part], attend, kept)
            parts.append(hidden)
            if kept is not None:
                collected.append(kept)
        layers = [_joined(layer)[0, :length] for layer in zip(*collected, strict=True)]
        return Prefilled(
            hidden=_joined(parts)[0, :length],
            states=torch.stack(layers) if piece.states else None,
            weights=None if recorder is None else recorder.rows()[:length],
        )

    def _attend(self, slot: int, start: int, recorder: AttentionRecorder | None) -> Attend:
        if self._at_once and recorder is None:
            return self._cache.prefill_at_once(slot, start)
        return self._cache.prefill(slot, start, recorder)


def _padded_length(piece: PrefillInput) -> int:
    return -(-len(piece.token_ids) // BLOCK) * BLOCK


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Parts (1, T, ...) as one; a single one as it is."""
    together = list(parts)
    return together[0] if len(together) == 1 else torch.cat(together, dim=1)
