"""What sampling a row gives: a token, an error, or the news that the text was complete.

Plain data of the standard library. Most results are a token with nothing else to tell, and these
are plain ints: no object is made for them.
"""

from dataclasses import dataclass

from logitd.model.inference.sampling.params import TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenWithLogprobs:
    """A token that was sampled or given, its logprob, and those of the likeliest in its place."""

    token_id: int
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleError:
    """No token could be sampled. `param` is the field of the request that caused it, if one did."""

    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class ConstraintComplete:
    """No token was sampled: the sequence's constraint lets nothing follow, its text is complete."""


SampleResult = int | TokenWithLogprobs | SampleError | ConstraintComplete
