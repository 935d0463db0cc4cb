"""Results of sampling a row: a token, an error, or a complete text.

Plain data of the standard library. A token without logprobs is a plain int, because most are.
"""

from dataclasses import dataclass
from typing import Any

from logitd.model.inference.sampling.params import TokenLogprob


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A sampled or given token, its logprob, and the likeliest ids in its place. `chosen` is None
    for the first token of a prompt, which nothing predicts."""

    token_id: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Logprobs of given tokens in NumPy arrays, for callers that store columns: an object for each
    token would be most of the cost.

    logprobs (R,), float64
    counts   (R,), number of likeliest ids of each row in `top_ids` and `top_logprobs` (N,)
    """

    logprobs: Any
    counts: Any
    top_ids: Any
    top_logprobs: Any


@dataclass(frozen=True, slots=True)
class SampleError:
    """The reason why no token could be sampled. `param` is the request's field that caused it."""

    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class ConstraintComplete:
    """No token: the text is complete, the sequence's constraint lets nothing follow."""


SampleResult = int | ScoredToken | SampleError | ConstraintComplete
