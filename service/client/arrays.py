"""Results that are arrays, and the chunks of a stream.

Arrays belong to the caller and are writable. Shapes: `P` requested positions, `T` tokens of the
prompt, `C` columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitd.service.client.results import Checkpoint, Choice, Reply, ScoredPrompt

Floats = npt.NDArray[np.floating[Any]]
"""float32, or float16 if the request names it."""
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk(Reply):
    """The news of a stream: pieces of choices, and logprobs of prompts."""

    choices: tuple[Choice, ...]
    prompts: tuple[ScoredPrompt, ...] | None = None

    @property
    def text(self) -> str:
        """The new text of the first completion; often empty if there are several."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayResult:
    """Members of the results for one prompt."""

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
    """The k largest logits of each row (P, k), descending. If processing leaves fewer than k, the
    others are -inf with the id -1."""

    top_ids: Integers
    top_logits: Floats
    stage: str


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates(ArrayResult):
    """`hidden_states` (layers, P, d_model): the residual stream before the final norm. Of all
    layers, 0 is after the embeddings and i after block i."""

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
