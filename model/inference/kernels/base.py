"""What the engine asks of a decoder, whichever computes: prompts into slots, steps, and samples.

The contract alone; `eager/`, `cpu/` and `cuda/` fulfil it, `select.py` chooses one of them.

Shapes: T positions of a piece, R rows, V = vocab_size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from logitd.model.inference.sampling.sample import SamplingRows


@dataclass(frozen=True, slots=True)
class AttentionSelection:
    """Attention weights of some layers and heads, each row with room for `length` keys."""

    layers: Sequence[int]
    heads: Sequence[int]
    length: int


@dataclass(frozen=True, slots=True)
class PrefillInput:
    """A piece of a prompt: its tokens, for a slot that holds the positions before `start`, a
    multiple of BLOCK; and what is wanted besides their final hidden states."""

    token_ids: Sequence[int]  # (T,)
    slot: int
    start: int
    states: bool = False
    weights: AttentionSelection | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing besides is wanted."""
        return not self.states and self.weights is None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What was computed of a piece; the optional parts where they were asked for."""

    hidden: Tensor  # (T, d_model): the final hidden states
    states: Tensor | None = None  # (n_layer + 1, T, d_model): embeddings, then after each block
    weights: Tensor | None = None  # (T, layers, heads, length): 0 for keys that are not seen


Collect = Callable[[], list[int | None]]
"""Waits for the tokens of a step that was launched, and for nothing that was launched later; None
for a row that is not finite. To be called before the second launch after it, or not at all."""


class Launcher(Protocol):
    """Launches decode steps with their sampling, waiting for nothing: two may be in flight. No slot
    has several rows. `sampling` is read before a call returns."""

    def launch(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        """Launch the step of these tokens: `Decoder.decode`, then `sample` of its logits."""

    def launch_next(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        """Launch the step of tokens that are not known yet: those that the launch before samples in
        these `rows` of its own. After a row that gets no token, results mean nothing."""


DecodeRows = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Token ids, slots and positions."""


class MixedPass(Protocol):
    """Computes prompts and a decode step in one pass, which reads weights once for both. Every row
    has the bits that `Decoder.prefill`, `head` and `decode` would give it."""

    most_rows: int
    """Tokens of a pass, those of prompts and of the step together."""

    def mixed(
        self, pieces: Sequence[PrefillInput], ends: Sequence[int], rows: DecodeRows
    ) -> tuple[list[Tensor], Tensor]:
        """Final hidden states (T, d_model) of each piece, which have to be plain; and logits
        (E + B, V): those that follow the last token of the pieces that `ends` names by their
        places, then those that follow each row of the step. The logits may be overwritten by the
        next call. No slot of a piece is one of the step's."""


class Decoder(Protocol):
    """A GPT over its KV cache: computes prompts into slots, one more position of each of several
    slots, or some that follow one another, and samples tokens."""

    has_threads: bool
    """Whether it decodes with threads of its own instead of torch's."""
    prefill_matches_decode: bool
    """Whether a position of a prompt and a decoded one come from the same code, with the same bits:
    then either can stand for the other in the cache."""

    @property
    def launcher(self) -> Launcher | None:
        """Launches a step before the tokens of the step before are known; None if it cannot."""

    @property
    def mixed_pass(self) -> MixedPass | None:
        """Computes prompts together with a step; None if it cannot, or that would not pay."""

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        """Compute pieces of prompts into their slots, one piece for each slot. Several have to be
        plain; each gives the bits that it would give alone, and they may share products."""

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

    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        """A token of each row of `logits` (R, V), float32: what `sample_tokens` gives."""

    def restore_weights(self) -> None:
        """The GPT is about to be computed with by torch: all of it has to be in memory."""

    def close(self) -> None:
        """Nothing is decoded any more."""
