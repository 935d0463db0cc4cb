"""The interface of a decoder, which prefills slots, computes decode steps and samples.

`eager/`, `cpu/` and `cuda/` implement it; `select.py` chooses the implementation.

Shapes: T positions of a piece of a prompt, R rows, V = vocab_size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from logitd.model.inference.sampling.sample import SamplingRows, sample_tokens


@dataclass(frozen=True, slots=True)
class AttentionSelection:
    """The layers and heads whose attention weights are returned. A row of weights has `length`
    keys."""

    layers: Sequence[int]
    heads: Sequence[int]
    length: int


@dataclass(frozen=True, slots=True)
class PrefillInput:
    """A piece of a prompt, and the outputs to return in addition to the final hidden states. The
    slot holds the positions before `start`, which is a multiple of BLOCK. Decoders that compute a
    whole sequence in one pass also need `prompt`, the whole prompt, and `first`, the first row
    whose final hidden state is read."""

    token_ids: Sequence[int]  # (T,)
    slot: int
    start: int
    states: bool = False
    weights: AttentionSelection | None = None
    prompt: Sequence[int] = ()
    first: int = 0

    @property
    def plain(self) -> bool:
        """True if only the final hidden states are requested."""
        return not self.states and self.weights is None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The outputs of a piece of a prompt. `states` and `weights` are None unless requested."""

    hidden: Tensor  # (T, d_model): the final hidden states
    states: Tensor | None = None  # (n_layer + 1, T, d_model): embeddings, then after each block
    weights: Tensor | None = None  # (T, layers, heads, length): 0 for later keys


Collect = Callable[[], list[list[int | None]]]
"""Waits for a launch, but not for later launches, and returns the tokens of each of its steps. None
stands for the token of a row whose logits are not finite. Must be called before the second launch
after this one."""


class Launcher(Protocol):
    """Launches decode steps, including sampling, without waiting for them to finish. A launch is
    one or more steps of the same rows; each step advances every row by one position. Two launches
    may be in flight. A slot has at most one row. `positions` are the rows' positions in the first
    step. `sampling` has the rows of the first step, then of the second, and so on; `sampling` is
    read before the call returns."""

    def most_steps(self, rows: int) -> int:
        """Maximum number of steps in a launch of this many rows, a power of 2."""

    def launch(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        """Launch a step with these tokens (`Decoder.decode`, then `sample` on its logits), and the
        steps after it."""

    def launch_next(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        """Launch steps before the tokens of the first one are known. The last step of the previous
        launch samples these tokens, in the rows with the indices `rows`. If such a row gets no
        token, the results of the row that continues it are undefined."""


DecodeRows = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""The token ids, the slots and the positions of a step's rows."""


class MixedPass(Protocol):
    """Computes prompts and a decode step in one pass, which reads the weights only once. Every row
    has the same bits as if `Decoder.prefill`, `head` and `decode` had computed it."""

    most_rows: int
    """Maximum number of rows of a pass: prompt positions plus rows of the decode step."""

    def mixed(
        self, pieces: Sequence[PrefillInput], ends: Sequence[int], rows: DecodeRows
    ) -> tuple[list[Tensor], Tensor]:
        """Return the final hidden states (T, d_model) of each piece, and logits (E + B, V): first
        the logits after the last tokens of the E pieces with the indices `ends`, then the logits of
        the B rows of the step. Pieces must be plain and share no slot with the step. The next call
        may overwrite the logits."""


class Decoder(Protocol):
    """Runs a model on its KV cache. The defaults suit a decoder that samples in plain torch, has no
    threads of its own, and has nothing to restore or free."""

    has_threads: bool = False
    """True if the decoder computes with its own threads instead of torch's."""
    prefill_matches_decode: bool = False
    """True if prefill and decode compute the keys and values of a position with the same bits. Then
    a prompt may reuse the keys and values of generated tokens."""

    @property
    def launcher(self) -> Launcher | None:
        """Launches steps before the tokens of the previous step are known; None if unsupported."""
        return None

    @property
    def mixed_pass(self) -> MixedPass | None:
        """Computes prompts together with a step; None if unsupported or not faster."""
        return None

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        """Compute pieces of prompts into their slots, at most one piece per slot. If there is more
        than one piece, all must be plain. Matrix products may cover several pieces, but a piece has
        the same bits as if computed alone."""

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        """Write keys and values of the tokens into the cache and return the logits (B, V) after
        each token. The next call may overwrite the logits.

        Rows of one slot must be adjacent, at consecutive positions; they have the same bits as if
        each were decoded in a separate call. B is at most the larger of the number of slots and
        DRAFTED_ROWS."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (R, V) of a prompt's final hidden states (R, d_model)."""

    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        """Sample a token from each row of `logits` (R, V), float32, as `sample_tokens` does.
        `computed` holds the logits before processing, which are checked for NaN and infinity."""
        return sample_tokens(logits, computed, sampling)

    def restore_weights(self) -> None:
        """Load all weights of the GPT back into memory, so that torch can compute with it."""
        return

    def close(self) -> None:
        """Free the decoder, which must not be used afterwards."""
        return
