"""Parameters of sampling: as the engine takes them, and as fields of a request body.

Bounds that hold for every model are checked here; what depends on the model is checked by
`model/inference/engine/validation.py`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request samples its tokens. `model/inference/sampling/sampler.py` defines each step.

    max_tokens         tokens to generate at most; 0 computes the prompt alone
    seed               key of the random numbers; same seed, same tokens (0 to 2^64 - 1). -1: the
                       LLM draws one for each prompt; the engine takes none
    temperature        0 is greedy
    top_k              keep the k likeliest (0: all)
    top_p, min_p       keep the likeliest that make up the mass p; those at least min_p as likely
                       as the likeliest
    repetition_penalty, presence_penalty, frequency_penalty   1, 0 and 0 do nothing
    logit_bias         added to the logits of ids
    allowed_token_ids  no other id can be sampled (None: all)
    constraint         what the whole text has to be (None: anything); ends the sequence when
                       nothing may follow, and may be cut short by max_tokens
    stop_token_ids     end the sequence; part of its ids
    min_tokens         nothing ends the sequence before so many tokens: no stop token is sampled
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
        _check_range("max_tokens", self.max_tokens, 0)
        _check_range("seed", self.seed, -1, 2**64 - 1)
        _check_range("temperature", self.temperature, 0, 10**6)
        _check_range("top_k", self.top_k, 0)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -100, 100)
        _check_range("frequency_penalty", self.frequency_penalty, -100, 100)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if self.top_p == 0:
            raise InvalidRequest("top_p is 0; it must be above 0 (1 keeps all)", "top_p")
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -(10**9), 10**9)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty; nothing could be sampled",
                                 "allowed_token_ids")  # fmt: skip
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0)
        if (
            self.min_tokens
            and self.allowed_token_ids is not None
            and self.stop_token_ids.issuperset(self.allowed_token_ids)
        ):
            raise InvalidRequest(
                "allowed_token_ids holds only stop tokens, which min_tokens forbids", "min_tokens"
            )
        if self.constraint is not None:
            _check_alone(self.constraint, self)


class SamplingFields(BaseModel):
    """Fields that bodies share with `SamplingParams`, under the same names. A field that is added
    here reaches every body, OpenAI's endpoints and the client."""

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
        """The fields of this class, as keywords of `SamplingParams`."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An id with its log probability (nats) and its rank (1: the likeliest)."""

    token_id: int
    logprob: float
    rank: int


def _check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not low <= value <= high or math.isinf(value):  # NaN fails every comparison
        bounds = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {value}; it must be a finite number, {bounds}", name)


def _check_alone(constraint: TokenConstraint, params: SamplingParams) -> None:
    """Reject what could leave a constrained sequence without any token to sample."""
    for name, given in (
        ("allowed_token_ids", params.allowed_token_ids is not None),
        ("min_tokens", params.min_tokens > 0),
    ):
        if given:
            raise InvalidRequest(
                f"{name} and {constraint.kind} could forbid every token together; leave one out",
                name,
            )
