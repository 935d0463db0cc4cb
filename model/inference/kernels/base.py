"""The interface of a decoder: it computes prompts into slots, decode steps, and samples.

`eager/`, `cpu/` and `cuda/` implement it, `select.py` chooses one of them.

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
    multiple of BLOCK; and the outputs to return next to the final hidden states."""

    token_ids: Sequence[int]  # (T,)
    slot: int
    start: int
    states: bool = False
    weights: AttentionSelection | None = None

    @property
    def plain(self) -> bool:
        """True if only the final hidden states are requested."""
        return not self.states and self.weights is None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The outputs of a piece; the optional ones are None unless requested."""

    hidden: Tensor  # (T, d_model): the final hidden states
    states: Tensor | None = None  # (n_layer + 1, T, d_model): embeddings, then after each block
    weights: Tensor | None = None  # (T, layers, heads, length): 0 for keys that are not seen


Collect = Callable[[], list[int | None]]
"""Wait for the tokens of a launched step, and for no later one; None for a row that is not finite.
Call it before the second launch after it, or never."""


class Launcher(Protocol):
    """Launch decode steps with their sampling without waiting: two may be in flight. No slot has
    several rows. `sampling` is read before a call returns."""

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
        """Launch the step of tokens that are not known yet: those that the previous launch samples
        in these `rows` of its own. The results that follow a row without a token are undefined."""


DecodeRows = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Token ids, slots and positions."""


class MixedPass(Protocol):
    """Compute prompts and a decode step in one pass, which reads weights once for both. Every row
    has the bits of `Decoder.prefill`, `head` and `decode`."""

    most_rows: int
    """Limit of a pass, in tokens of prompts and of the step together."""

    def mixed(
        self, pieces: Sequence[PrefillInput], ends: Sequence[int], rows: DecodeRows
    ) -> tuple[list[Tensor], Tensor]:
        """Return the final hidden states (T, d_model) of each piece, and logits (E + B, V): those
        after the last token of the pieces with the indices `ends`, then those after each row of
        the step. The pieces are plain, and share no slot with the step. The next call may overwrite
        the logits."""


class Decoder(Protocol):
    """A GPT over its KV cache."""

    has_threads: bool
    """True if it decodes with threads of its own instead of torch's."""
    prefill_matches_decode: bool
    """True if the same code computes a prompt's position and a decoded one, with the same bits:
    then the cache may hold either for the other."""

    @property
    def launcher(self) -> Launcher | None:
        """Launches a step before the tokens of the last one are known; None if it cannot."""

    @property
    def mixed_pass(self) -> MixedPass | None:
        """Computes prompts together with a step; None if it cannot or gains nothing."""

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        """Compute pieces of prompts into their slots, one piece per slot. Several pieces must be
        plain; they may share products, and each has the bits that it has alone."""

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        """Write keys and values of the tokens into the cache and return the logits (B, V) after
        each. The next call may overwrite them.

        Rows of one slot are adjacent, at consecutive positions, and have the bits of calls of one
        row each. The limit is the number of slots, or DRAFTED_ROWS if that is more."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (R, V) of a prompt's final hidden states (R, d_model)."""

    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        """A token of each row of `logits` (R, V), float32, as `sample_tokens` chooses it."""

    def restore_weights(self) -> None:
        """Bring all weights of the GPT back into memory, before torch computes with it."""

    def close(self) -> None:
        """Free the decoder. It decodes nothing afterwards."""
