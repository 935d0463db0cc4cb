"""Parameters of sampling, for the engine and as fields of a request body.

Checks the bounds that hold for every model. `model/inference/engine/validation.py` checks those
that depend on the model.
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
"""Bounds of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. `model/inference/sampling/sampler.py` defines each step.

    max_tokens         limit of generated tokens; 0 computes the prompt only
    seed               key of the random numbers (0 to 2^64 - 1); the same seed, the same tokens.
                       -1: the LLM draws one for each prompt; the engine refuses it
    temperature        0 is greedy
    top_k              keep the k likeliest (0: all)
    top_p, min_p       keep the likeliest with total mass p; those at least min_p as likely as the
                       likeliest
    repetition_penalty, presence_penalty, frequency_penalty   off at 1, 0 and 0
    logit_bias         added to the logits of ids
    allowed_token_ids  only these can be sampled (None: all)
    constraint         rule for the whole text; ends the sequence when nothing may follow, and may
                       be cut short by max_tokens
    stop_token_ids     end the sequence, as its last token
    min_tokens         number of tokens before which no stop token is sampled
    logprobs           None: none; k: of each token, and of the k likeliest
    logprobs_stage     raw or processed
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
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias is {self.logit_bias!r}; it must be {{token id: bias}}", "logit_bias"
            )
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -(10**9), 10**9)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0)
        if self.top_p == 0:
            raise InvalidRequest("top_p is 0; it must be above 0 (1 keeps all)", "top_p")
        allowed = self.allowed_token_ids
        if allowed is not None and not allowed:
            raise InvalidRequest(
                "allowed_token_ids is empty; nothing could be sampled", "allowed_token_ids"
            )
        if self.min_tokens and allowed is not None and self.stop_token_ids.issuperset(allowed):
            raise InvalidRequest(
                "allowed_token_ids holds only stop tokens, which min_tokens forbids", "min_tokens"
            )
        if self.constraint is not None and (allowed is not None or self.min_tokens):
            name = "min_tokens" if allowed is None else "allowed_token_ids"
            raise InvalidRequest(
                f"{name} and {self.constraint.kind} could forbid every token together; leave one "
                "out",
                name,
            )


class SamplingFields(BaseModel):
    """Fields that bodies share with `SamplingParams`, under the same names. A new field here is in
    every body, OpenAI's endpoints and the client."""

    temperature: Annotated[float, Field(ge=0, le=1e6)] = Field(1.0, description="0 is greedy.")
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="Sample from the k likeliest. 0: all."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Sample from the likeliest that make up p."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Sample from those at least p times as likely as the likeliest."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, description="Divides the logits of tokens seen so far. 1: off."
    )
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] = Field(
        0.0, description="Taken once from tokens generated so far."
    )
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] = Field(
        0.0, description="Taken from generated tokens as often as they occurred."
    )

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields as keywords of `SamplingParams`."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An id with its log probability (nats) and its rank (1: the likeliest)."""

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
