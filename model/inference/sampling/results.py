"""Results of sampling a row: a token, an error, or the end of a constraint.

A token without logprobs is a plain int, for speed, because most tokens have none.
"""

from dataclasses import dataclass
from typing import Any

from logitd.model.inference.sampling.params import TokenLogprob


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A sampled or given token, its logprob, and the most likely ids at its position. `chosen` is
    None for the first token of a prompt, which has no prediction."""

    token_id: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Logprobs of given tokens in NumPy arrays, for callers that store columns. This saves the time
    of creating an object for each token.

    logprobs               (R,), float64
    counts                 (R,), number of most likely ids of each row
    top_ids, top_logprobs  the most likely ids of all rows and their logprobs, one row after another
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
    """No token was sampled, because the text is complete and the constraint allows no further
    token."""


SampleResult = int | ScoredToken | SampleError | ConstraintComplete
