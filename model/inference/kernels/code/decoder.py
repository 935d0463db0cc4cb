"""CodeDecoder: computes prompts and decode steps in the process that runs the code of a model's
owner.

The final hidden states of this decoder are the logits, and its head is the identity. Its cache
holds the token ids of each slot: each pass computes the whole sequence again, unless the model has
its own cache. A prompt is computed in one pass, however it is divided into pieces, and a decode
step in one pass per row. So the bits of a row do not depend on the batch, except with
`--batch-code`.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from logitd.model.inference.kernels.base import Decoder, Prefilled, PrefillInput
from logitd.model.inference.kernels.eager.taps import PieceTap
from logitd.model.owner_code.connection import CodeModel, Wanted
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.stages import Key


class TokenCache:
    """The token ids of `slots` sequences, each up to the context length."""

    def __init__(self, slots: int, context_length: int) -> None:
        self._ids: list[list[int]] = [[] for _ in range(slots)]
        self.nbytes = slots * context_length * 8  # one int64 per id, as they are sent

    @property
    def slots(self) -> int:
        return len(self._ids)

    def write(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Replace the ids of a slot from position `start` on."""
        self._ids[slot][start:] = token_ids

    def read(self, slot: int, end: int) -> list[int]:
        """The ids of positions [0, end)."""
        return self._ids[slot][:end]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        if source != target:
            self._ids[target] = self.read(source, length)


class CodeDecoder(Decoder):
    """Runs a model with its owner's code, in another process."""

    def __init__(self, model: CodeModel, cache: TokenCache) -> None:
        self._model = model
        self._cache = cache
        self._prompts: dict[int, int] = {}  # length of each slot's prompt
        self._width = model.config.vocab_size

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        """Prefill pieces. Rows before the first needed row of a piece are undefined."""
        for piece in pieces:
            self._cache.write(piece.slot, piece.start, piece.token_ids)
            self._prompts[piece.slot] = _end(piece)
        if len(pieces) == 1 and pieces[0].states:
            return [self._with_states(pieces[0])]
        needed = [piece for piece in pieces if piece.first < len(piece.token_ids)]
        wanted = [
            Wanted(self._prompt(piece), piece.start + piece.first, _end(piece), piece.slot)
            for piece in needed
        ]
        logits = iter(self._logits(wanted))
        prefilled = []
        for piece in pieces:
            hidden = torch.empty(len(piece.token_ids), self._width)
            if piece in needed:
                hidden[piece.first :] = next(logits)
            prefilled.append(Prefilled(hidden))
        return prefilled

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        wanted = []
        for token_id, slot, position in zip(token_ids, slots, positions, strict=True):
            self._cache.write(slot, position, [token_id])
            ids = self._cache.read(slot, position + 1)
            wanted.append(Wanted(ids, position, position + 1, slot, self._prompts[slot]))
        return self._model.logits(wanted)

    def tapped(
        self, token_ids: Sequence[int], first: int, end: int, tap: PieceTap, keys: Collection[Key]
    ) -> Tensor:
        """Logits (end - first, V) of a sequence, with a tap on the stages in `keys`. The tap's
        first position is 0."""

        def visit(name: str, value: Tensor) -> Tensor:
            return tap(None, name, value)

        names = [name for _, name in keys]
        return self._model.logits([Wanted(token_ids, first, end)], names, visit)

    def lens(self, stream: Tensor) -> Tensor:
        """Logits (P, V) that the final norm and the head compute from a stream (P, d)."""
        return self._model.lens(stream)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden

    def close(self) -> None:
        self._model.close()

    def _logits(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """The requested logits of each sequence. Without `--batch-code`, a block of positions is
        requested at a time, because the time limit of a request also applies to a model that
        returns the logits of the last position only, for which each position is a pass."""
        if self._model.together:
            rows = self._model.logits(wanted) if wanted else torch.empty(0, self._width)
            return list(rows.split([one.end - one.first for one in wanted]))
        return [torch.cat([self._model.logits([part]) for part in _blocks(one)]) for one in wanted]

    def _with_states(self, piece: PrefillInput) -> Prefilled:
        keys: list[Key] = [(None, name) for name in self._model.config.streams]
        rows = range(piece.start, _end(piece))
        tap = PieceTap(0, None, keys, rows=rows)
        logits = self.tapped(self._prompt(piece), piece.start, _end(piece), tap, keys)
        return Prefilled(logits, states=torch.stack([tap.recorded(*key) for key in keys]))

    def _prompt(self, piece: PrefillInput) -> Sequence[int]:
        return piece.prompt or self._cache.read(piece.slot, _end(piece))


def _blocks(wanted: Wanted) -> Iterator[Wanted]:
    for first in range(wanted.first, wanted.end, BLOCK):
        yield replace(wanted, first=first, end=min(first + BLOCK, wanted.end))


def _end(piece: PrefillInput) -> int:
    return piece.start + len(piece.token_ids)
