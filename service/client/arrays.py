"""Results that are arrays, and the chunks of a stream.

Arrays are the caller's own and may be written to. Shapes: `P` positions asked for, `T` tokens of
the prompt, `C` columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitd.service.client.results import Checkpoint, Choice, ScoredPrompt

Floats = npt.NDArray[np.floating[Any]]
"""float32; float16 if that was asked for."""
Integers = npt.NDArray[np.int64]

__all__ = ["Activations", "Attention", "Chunk", "HiddenStates", "Logits", "TopLogits"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new in a stream: of the choices that grew, and of the prompts' logprobs."""

    id: str
    created: int
    model: str
    checkpoint: Checkpoint
    choices: tuple[Choice, ...]
    request_id: str
    prompts: tuple[ScoredPrompt, ...] | None = None

    @property
    def text(self) -> str:
        """What is new of the first completion; often nothing where there are several."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """`logits` (P, C) of one prompt: row i predicts the token after `positions[i]`."""

    logits: Floats
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    stage: str
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class TopLogits:
    """The k largest logits of each row (P, k), descending. Where processing has left fewer than k,
    the rest are -inf, with the id -1."""

    top_ids: Integers
    top_logits: Floats
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    stage: str
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates:
    """`hidden_states` (layers, P, d_model) of one prompt: the residual stream, before the final
    norm; of all layers, 0 is after the embeddings and i after block i."""

    hidden_states: Floats
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """`attention` (layers, heads, P, T) of one prompt; each row sums to 1."""

    attention: Floats
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """The values of stages (P, ...) of one prompt, by their names."""

    stages: Mapping[str, Floats]
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    checkpoint: Checkpoint
    request_id: str

    def __getitem__(self, stage: str) -> Floats:
        return self.stages[stage]
