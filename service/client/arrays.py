"""Results that are arrays, and the chunks of a stream.

The arrays are writable, and nothing else refers to them. Shapes: `P` requested positions, `T`
tokens of the prompt, `C` columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitd.service.client.results import Checkpoint, Choice, Reply, ScoredPrompt

Floats = npt.NDArray[np.floating[Any]]
"""float32, or float16 if the request has that `dtype`."""
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk(Reply):
    """One event of a stream: new pieces of choices, and logprobs of prompts."""

    choices: tuple[Choice, ...]
    prompts: tuple[ScoredPrompt, ...] | None = None

    @property
    def text(self) -> str:
        """The new text of the first completion. It is often empty if there are several."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayResult:
    """Members that all array results have. A result belongs to one prompt."""

    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Logits(ArrayResult):
    """`logits` (P, C): row i predicts the token after `positions[i]`."""

    logits: Floats
    stage: str


@dataclass(frozen=True, slots=True, eq=False)
class TopLogits(ArrayResult):
    """The k largest logits of each row (P, k), in descending order. If processing leaves fewer than
    k, the rest of the row is -inf with the id -1."""

    top_ids: Integers
    top_logits: Floats
    stage: str


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates(ArrayResult):
    """`hidden_states` (layers, P, d_model): the residual stream before the final norm. Without
    `layers` in the request, layer 0 is the stream after the embeddings, layer i after block i."""

    hidden_states: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Attention(ArrayResult):
    """`attention` (layers, heads, P, T); each row sums to 1."""

    attention: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Activations(ArrayResult):
    """Values of stages (P, ...), by stage name."""

    stages: Mapping[str, Floats]

    def __getitem__(self, stage: str) -> Floats:
        return self.stages[stage]
