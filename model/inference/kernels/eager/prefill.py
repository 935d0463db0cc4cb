"""Prefill: computes prompts into their slots with torch.

It computes whole blocks of 32 positions that begin at multiples of 32, so that the arithmetic of a
row depends only on its position. For the same reason, blocks of several prompts can be rows of one
matrix product, up to the limit of `row_groups.py`.

Shapes: T positions of a piece; N positions of several pieces, concatenated, each padded to whole
blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from logitd.model.transformer.tap import UNTAPPED, Tap


class TorchPrefill:
    """Prefills prompts into the slots of a GPT's cache, one torch operation at a time.

    blockwise  compute BLOCK positions at a time, for batch invariance on a GPU, which chooses
               kernels by the number of rows
    at_once    compute the attention of a piece in one operation, for speed on a GPU
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
        """`contended`: other processes are known to use the cores."""
        results = list[Prefilled]()
        for few in self._sharing_products(pieces):
            alone = len(few) == 1
            results += [self._alone(few[0], contended)] if alone else self._together(few, contended)
        return results

    @cached_property
    def _rows(self) -> int:
        """Maximum number of positions in one matrix product."""
        return BLOCK if self._blockwise else prefill_rows(self._gpt)

    def _sharing_products(self, pieces: Sequence[PrefillInput]) -> Iterator[list[PrefillInput]]:
        """Divide the pieces, in their order, into groups that are computed together."""
        few, rows = list[PrefillInput](), 0
        for piece in pieces:
            length = _padded_length(piece.token_ids)
            if few and (self._at_once or rows + length > self._rows):
                yield few
                few, rows = [], 0
            few.append(piece)
            rows += length
        yield few

    def _together(self, pieces: Sequence[PrefillInput], contended: bool) -> list[Prefilled]:
        assert all(piece.plain for piece in pieces)
        lengths = [_padded_length(piece.token_ids) for piece in pieces]
        padded = [
            PaddedPiece.of(self._gpt, self._cache, piece.token_ids, piece.slot, piece.start)
            for piece in pieces
        ]
        attend = attend_apart(
            [self._cache.prefill(piece.slot, piece.start) for piece in pieces], lengths
        )
        with self._contention.watched(sum(lengths), contended):
            hidden = PaddedPiece.joined(padded).transform(self._gpt, attend)
        parts = hidden[0].split(lengths)  # (N, d_model) to (T padded, d_model) each
        return [
            Prefilled(part[: len(piece.token_ids)])
            for piece, part in zip(pieces, parts, strict=True)
        ]

    def _alone(self, piece: PrefillInput, contended: bool) -> Prefilled:
        weights, length = piece.weights, len(piece.token_ids)
        padded = PaddedPiece.of(self._gpt, self._cache, piece.token_ids, piece.slot, piece.start)
        recorder = None
        if weights is not None:
            recorder = AttentionRecorder(weights.layers, weights.heads, weights.length)
        width = padded.length if self._at_once else self._rows
        parts: list[Tensor] = []  # (1, width, d_model) each
        collected: list[list[Tensor]] = []
        for offset in range(0, padded.length, width):
            part = padded[offset : offset + width]
            kept: list[Tensor] | None = [] if piece.states else None
            attend = self._attend(piece.slot, piece.start + offset, recorder)
            with self._contention.watched(width, contended):
                hidden = part.transform(self._gpt, attend, kept)
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


@dataclass(frozen=True, slots=True)
class PaddedPiece:
    """One or more pieces of prompts, padded to whole blocks. Each tensor is (1, N). The keys and
    token ids of the padding are overwritten before any position reads them; the caller drops the
    results of the padding."""

    ids: Tensor
    positions: Tensor
    previous_ids: Tensor | None  # for `smear`

    @classmethod
    def of(
        cls, gpt: GPT, cache: KVCache, token_ids: Sequence[int], slot: int, start: int
    ) -> "PaddedPiece":
        """Pad a piece, and write its token ids into its slot."""
        assert start % BLOCK == 0
        device, length = gpt.token_embedding.weight.device, _padded_length(token_ids)
        padded = [*token_ids, *[0] * (length - len(token_ids))]
        previous = cache.put_token_ids(padded, [slot] * length, range(start, start + length))
        positions = torch.arange(start, start + length, device=device)
        return cls(
            torch.tensor([padded], device=device),
            positions.clamp(max=gpt.config.context_length - 1)[None],
            None if previous is None else previous[None],
        )

    @classmethod
    def joined(cls, pieces: Sequence["PaddedPiece"]) -> "PaddedPiece":
        previous = [piece.previous_ids for piece in pieces if piece.previous_ids is not None]
        return cls(
            _joined(piece.ids for piece in pieces),
            _joined(piece.positions for piece in pieces),
            _joined(previous) if previous else None,
        )

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def __getitem__(self, part: slice) -> "PaddedPiece":
        previous = self.previous_ids
        return PaddedPiece(
            self.ids[:, part],
            self.positions[:, part],
            None if previous is None else previous[:, part],
        )

    def transform(
        self,
        gpt: GPT,
        attend: Attend,
        states: list[Tensor] | None = None,
        tap: Tap = UNTAPPED,
    ) -> Tensor:
        """Compute the final hidden states (1, N, d_model)."""
        return gpt.transform(self.ids, self.positions, attend, states, tap, self.previous_ids)


def _padded_length(token_ids: Sequence[int]) -> int:
    return -(-len(token_ids) // BLOCK) * BLOCK


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Concatenate parts (1, T, ...); a single one is not copied."""
    together = list(parts)
    return together[0] if len(together) == 1 else torch.cat(together, dim=1)
