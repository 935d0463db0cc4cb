"""PlainDecoder: prompts and decode steps in stock torch, wherever torch runs; the others' twin.

Rows of a step are padded to a multiple of ROW_GROUP: so the arithmetic of a row does not depend on
how many are computed beside it. Measured on the matrix products of CPUs: the bits of a row differ
between 1, 2 to 3, and 4 or more rows, and are one class from 4 rows up in multiples of 4. Only
products smaller than those of real models are outside of this: in float32 with fewer than 12
columns and an inner width that is no multiple of 4, in bfloat16 with rows * columns * inner width
up to 4096, where torch changes kernels.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model.inference.kernels.eager.prefill import Piece, Prefilled, TorchPrefill
from model.inference.kv_cache import KVCache
from model.inference.sampling.sample import Draws, draw_tokens
from model.transformer.config import BLOCK
from model.transformer.gpt import GPT

ROW_GROUP = 4


Collect = Callable[[], list[int | None]]
"""Waits for the tokens of a step that was launched, and for nothing that was launched later; None
for a row that is not finite. To be called before the second launch after it, or not at all."""


class Launcher(Protocol):
    """Decode steps with their draws, begun without waiting for anything: two may be under way. No
    slot has several rows. `draws` are read before a call returns."""

    def launch(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        draws: Draws,
    ) -> Collect:
        """Begin the step of these tokens; as `Decoder.decode` and `draw` of what it gives."""

    def launch_behind(
        self, rows: Sequence[int], slots: Sequence[int], positions: Sequence[int], draws: Draws
    ) -> Collect:
        """Begin the step of tokens that are not known yet: those which the launch before draws in
        these `rows` of its own. What follows a row that gets no token means nothing."""


class Decoder(Protocol):
    """A GPT over its KV cache: computes prompts into slots, one more position of each of several
    slots, or some that follow one another, and draws tokens."""

    has_threads: bool
    """Whether it decodes with threads of its own instead of torch's."""
    phases_agree: bool
    """Whether a position of a prompt and a decoded one come from the same code, with the same bits:
    then either can stand for the other in the cache."""

    @property
    def ahead(self) -> Launcher | None:
        """What launches its steps before the tokens of those before them are known, if it can."""

    def prefill(self, piece: Piece) -> Prefilled:
        """Compute positions of a prompt into their slot."""

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        """Logits (B, V) that follow the tokens, whose keys and values are written into the cache.
        They may be overwritten by the next call.

        Rows of one slot stand together, each at the position after the one before it, and give the
        bits that calls of one row each would give. At most as many rows as there are slots, or
        DRAFTED_ROWS where that is more."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (R, V) of a prompt's final hidden states (R, d_model)."""

    def draw(self, logits: Tensor, computed: Tensor, draws: Draws) -> list[int | None]:
        """A token of each row of `logits` (R, V), float32: what `draw_tokens` gives."""

    def close(self) -> None:
        """Nothing is decoded any more."""


class PlainDecoder:
    """A GPT over its KV cache, one torch operation after the other."""

    has_threads = False
    phases_agree = False
    ahead = None

    def __init__(self, gpt: GPT, cache: KVCache) -> None:
        self._gpt = gpt
        self._cache = cache
        self._device = gpt.token_embedding.weight.device
        self._prefill = TorchPrefill(gpt, cache)

    def prefill(self, piece: Piece) -> Prefilled:
        return self._prefill(piece)

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        padding = [0] * (-len(token_ids) % ROW_GROUP)
        ids = torch.tensor([*token_ids, *padding], device=self._device)
        places = torch.tensor([*positions, *padding], device=self._device)
        attend = self._cache.decode(slots, positions)
        hidden = self._gpt.transform(
            ids[:, None], places[:, None], attend
        )  # (B padded, 1, d_model)
        return self._gpt.logits(hidden[:, 0])[: len(token_ids)]

    def head(self, hidden: Tensor) -> Tensor:
        return padded_logits(self._gpt, hidden)

    def draw(self, logits: Tensor, computed: Tensor, draws: Draws) -> list[int | None]:
        return draw_tokens(logits, computed, draws)

    def close(self) -> None:
        """Nothing to end."""


def padded_logits(gpt: GPT, hidden: Tensor) -> Tensor:
    """Logits (R, V) of hidden states (R, d_model), by rows padded like those of decode."""
    padding = -len(hidden) % ROW_GROUP
    return gpt.logits(F.pad(hidden, (0, 0, 0, padding)))[: len(hidden)]


def block_logits(gpt: GPT, hidden: Tensor) -> Tensor:
    """Logits (R, V) of hidden states (R, d_model), by products of BLOCK rows each whatever R is:
    where the kernel of a product, and with it a row's bits, depends on the number of rows."""
    padded = F.pad(hidden, (0, 0, 0, -len(hidden) % BLOCK))
    return torch.cat([gpt.logits(rows) for rows in padded.split(BLOCK)])[: len(hidden)]
