"""Fields: what can be asked for, as the keyword arguments of the client's calls.

Types only, so that a wrong name or kind is found before anything runs. Names, defaults and meanings
are the server's, which refuses what it does not know: /docs describes each. A field that is left
out has the server's default.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

import numpy as np
import numpy.typing as npt

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
OnePrompt = str | TokenIds
ManyPrompts = Sequence[OnePrompt]
Prompt = OnePrompt | ManyPrompts
"""A text, token ids, or a list of texts and lists of ids."""
OneOrManyIds = TokenIds | Sequence[TokenIds]
LogitBias = Mapping[int, float] | Mapping[str, float]
DType = Literal["float32", "float16", "bfloat16"]
"""The numbers that are sent; bfloat16 is float32 again in the result's arrays."""
Stage = Literal["raw", "processed"]
PositionRange = TypedDict("PositionRange", {"from": int, "to": int}, total=False)
Positions = Literal["last", "all"] | TokenIds | PositionRange


Values = Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[np.floating[Any]]
"""Of a stage: at one position, or a list of such, one for each."""


class Source(TypedDict, total=False):
    """Another prompt, of which a stage is read."""

    prompt: Required[OnePrompt]
    positions: Positions


Intervention = TypedDict(
    "Intervention",
    {
        "stage": Required[str],
        "operation": Required[Literal["zero", "scale", "add", "set"]],
        "positions": Literal["all", "prompt", "generated", "last"] | TokenIds | PositionRange,
        "heads": TokenIds | None,
        "factor": float | None,
        "values": Values | None,
        "from": Source | None,
        "minus": Source | None,
    },
    total=False,
)
"""A change inside the forward; `from` is a word of Python's: write it as a dict."""
Interventions = Sequence[Intervention]


class Processing(TypedDict, total=False):
    """What happens to logits before a token is sampled."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: LogitBias
    allowed_token_ids: TokenIds | None
    completion_start: int | None


class GenerateFields(TypedDict, total=False):
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: LogitBias
    allowed_token_ids: TokenIds | None
    regex: str | None
    json_schema: Mapping[str, Any] | None
    choice: Sequence[str] | None
    grammar: str | None
    stop: str | Sequence[str]
    stop_token_ids: TokenIds
    ignore_eos: bool
    min_tokens: int
    seed: int | None
    n: int
    logprobs: int | None
    logprobs_stage: Stage
    prompt_logprobs: int | None
    echo: bool
    priority: int
    prefix_reuse: bool
    interventions: Interventions
    timeout: float | None
    model: str | None


class LogitsFields(TypedDict, total=False):
    positions: Positions
    token_ids: TokenIds | None
    stage: Stage
    processing: Processing | None
    dtype: DType
    interventions: Interventions
    timeout: float | None
    model: str | None


class HiddenStatesFields(TypedDict, total=False):
    layers: TokenIds | None
    positions: Positions
    dtype: DType
    interventions: Interventions
    timeout: float | None
    model: str | None


class AttentionFields(TypedDict, total=False):
    layers: TokenIds | None
    heads: TokenIds | None
    positions: Positions
    dtype: DType
    interventions: Interventions
    timeout: float | None
    model: str | None


class ActivationsFields(TypedDict, total=False):
    positions: Positions
    heads: TokenIds | None
    interventions: Interventions
    dtype: DType
    timeout: float | None
    model: str | None


class LensFields(TypedDict, total=False):
    layers: TokenIds | None
    positions: Positions
    top_k: int
    token_ids: TokenIds | None
    tokens: Sequence[str] | None
    interventions: Interventions
    timeout: float | None
    model: str | None


class AttributionsFields(TypedDict, total=False):
    token: str | None
    token_id: int | None
    minus: str | None
    minus_id: int | None
    position: int
    methods: Sequence[Literal["gradient_times_input", "integrated_gradients", "direct"]]
    steps: int | None
    baseline: Literal["zero"] | int | None
    timeout: float | None
    model: str | None


class SweepFields(TypedDict, total=False):
    token: str | None
    token_id: int | None
    minus: str | None
    minus_id: int | None
    position: int
    interventions: Interventions
    timeout: float | None
    model: str | None


class ProbsFields(TypedDict, total=False):
    top_k: int | None
    token_ids: TokenIds | None
    tokens: Sequence[str] | None
    stage: Stage
    processing: Processing | None
    perplexity: bool
    interventions: Interventions
    timeout: float | None
    model: str | None


class TokenizeFields(TypedDict, total=False):
    special_tokens: Literal["ids", "text"]
    pieces: bool | None
    add_special_tokens: bool
    model: str | None


class DetokenizeFields(TypedDict, total=False):
    model: str | None


class ScoreFields(TypedDict, total=False):
    continuations: ManyPrompts | None
    logprobs: int | None
    interventions: Interventions
    timeout: float | None
    model: str | None
