"""Sampling parameters, for the engine and as fields of a request body.

This module checks the bounds that are the same for every model;
`model/inference/engine/validation.py` checks the bounds that depend on the model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from logitd.model.inference.constraints.protocol import TokenConstraint
from logitd.model.inference.errors import InvalidRequest

Stage = Literal["raw", "processed"]
"""Logprobs before (raw) or after (processed) bias, penalties, temperature and filters."""
RANGES: Mapping[str, tuple[float, float]] = {
    "max_tokens": (0, math.inf),
    "seed": (-1, 2**64 - 1),
    "temperature": (0, 10**6),
    "top_k": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (0.01, 100),
}
"""Smallest and largest value of each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. `model/inference/sampling/sampler.py` defines each step.

    max_tokens         maximum number of generated tokens; 0 computes only the prompt
    seed               key of the random numbers (0 to 2^64 - 1): the same seed gives the same
                       tokens. -1: LLM draws a seed for each prompt; the engine refuses -1
    temperature        0 is greedy
    top_k              keep the k most likely tokens (0: all)
    top_p              keep the most likely tokens whose total probability reaches top_p
    min_p              keep tokens at least min_p times as likely as the most likely one
    repetition_penalty, presence_penalty, frequency_penalty   1, 0 and 0 turn them off
    logit_bias         values to add to the logits of some ids
    allowed_token_ids  the only ids that can be sampled (None: all)
    constraint         pattern that the whole text must match; ends the sequence when no token
                       may follow. max_tokens may cut the text short
    stop_token_ids     ids that end the sequence; the sampled one is its last token
    min_tokens         number of tokens that must be generated before a stop token
    logprobs           None: none; k: logprobs of each token and of the k most likely ones
    logprobs_stage     raw or processed logprobs
    """

    max_tokens: int
    seed: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    constraint: TokenConstraint | None = None
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None
    logprobs_stage: Stage = "raw"

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            _check_range(name, getattr(self, name), low, high)
        _check_range("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}: lower "
                "min_tokens or raise max_tokens",
                "min_tokens",
            )
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias is {self.logit_bias!r}; it must be {{token id: bias}}", "logit_bias"
            )
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -(10**9), 10**9)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0)
        if self.top_p == 0:
            raise InvalidRequest("top_p is 0; it must be above 0 (1 keeps all tokens)", "top_p")
        allowed = self.allowed_token_ids
        if allowed is not None and not allowed:
            raise InvalidRequest(
                "allowed_token_ids is empty; give at least one id", "allowed_token_ids"
            )
        if self.min_tokens and allowed is not None and self.stop_token_ids.issuperset(allowed):
            raise InvalidRequest(
                "allowed_token_ids has only stop tokens, so min_tokens leaves no token to sample: "
                "remove one of the two",
                "min_tokens",
            )
        if self.constraint is not None and (allowed is not None or self.min_tokens):
            name = "min_tokens" if allowed is None else "allowed_token_ids"
            raise InvalidRequest(
                f"{name} and {self.constraint.kind} together could forbid every token; remove one",
                name,
            )


class SamplingFields(BaseModel):
    """The fields of `SamplingParams` that request bodies have under the same names. All bodies,
    OpenAI's endpoints and the client accept a field that is added here."""

    temperature: Annotated[float, Field(ge=0, le=1e6)] = Field(1.0, description="0 is greedy.")
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="Sample from the k most likely tokens. 0: all."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Sample from the most likely tokens whose total probability reaches top_p."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Sample from tokens at least min_p times as likely as the most likely one."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, description="Divides the logits of tokens seen so far. 1: off."
    )
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] = Field(
        0.0, description="Subtracted once from the logits of tokens generated so far."
    )
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] = Field(
        0.0, description="Subtracted from the logits of generated tokens, once per occurrence."
    )

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields as keywords of `SamplingParams`."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An id with its log probability (nats) and its rank (1: the most likely)."""

    token_id: int
    logprob: float
    rank: int


def _check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    try:
        fits = low <= value <= high and not math.isinf(value)  # NaN fails every comparison
    except TypeError:
        fits = False
    if not fits:
        bounds = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {value!r}; it must be a finite number, {bounds}", name)
