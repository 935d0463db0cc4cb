"""Tokens as members of requests and replies: id, readable text, bytes and logprobs."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from logitd.model.inference.engine.events import TokenEvent
from logitd.model.inference.sampling import distribution
from logitd.model.inference.sampling.results import ScoredToken
from logitd.model.operations.body import ReplyBody, RequestBody, Text, TokenId
from logitd.model.operations.prompts import single_token
from logitd.model.text.tokenizer import Tokenizer


class ComparedTokens(RequestBody):
    """The token whose logit is computed, and the token whose logit is subtracted."""

    alternatives: ClassVar[Sequence[Sequence[str]]] = (("token", "token_id"), ("minus", "minus_id"))

    token: Text | None = Field(None, description="Text of the token whose logit is computed.")
    token_id: TokenId | None = Field(
        None,
        description="Id of the token whose logit is computed. Without token and token_id: the "
        "likeliest next token.",
    )
    minus: Text | None = Field(None, description="Text of the token whose logit is subtracted.")
    minus_id: TokenId | None = Field(None, description="Id of the token whose logit is subtracted.")

    def compared(self, tokenizer: Tokenizer) -> tuple[int | None, int | None]:
        """The ids of both tokens; None for a token that the body does not name."""
        token, minus = self.token_id, self.minus_id
        if self.token is not None:
            token = single_token(self.token, tokenizer, "token")
        if self.minus is not None:
            minus = single_token(self.minus, tokenizer, "minus")
        return token, minus


class NamedToken(ReplyBody):
    id: int
    text: str = Field(description="Readable text; bytes that are not UTF-8 become U+FFFD.")
    bytes: list[int]


class TopToken(NamedToken):
    logprob: float
    rank: int = Field(description="1 is the likeliest.")


class Token(NamedToken):
    logprob: float | None = Field(
        description="null for the first token of a prompt, which has no prediction."
    )
    rank: int | None
    top: list[TopToken]


class TokenProb(NamedToken):
    prob: float
    logprob: float | None = Field(description="null if processing removed the token (prob 0).")
    rank: int


def token_json(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """The members of `NamedToken` for an id."""
    return {
        "id": token_id,
        "text": tokenizer.token_text(token_id),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def prob_json(tokenizer: Tokenizer, token: distribution.TokenProb) -> dict[str, Any]:
    """The members of `TokenProb`. A logprob of -inf is written as null."""
    return {
        **token_json(tokenizer, token.token_id),
        "prob": token.prob,
        "logprob": token.logprob,
        "rank": token.rank,
    }


def scored_json(tokenizer: Tokenizer, token: ScoredToken | TokenEvent) -> dict[str, Any]:
    """The members of `Token`. The logprob is null if the model did not predict the token, as for
    the first token of a prompt."""
    chosen = token.chosen
    return {
        **token_json(tokenizer, token.token_id),
        "logprob": None if chosen is None else chosen.logprob,
        "rank": None if chosen is None else chosen.rank,
        "top": [
            {
                **token_json(tokenizer, likely.token_id),
                "logprob": likely.logprob,
                "rank": likely.rank,
            }
            for likely in token.top
        ],
    }


def first_likeliest(token: ScoredToken, count: int) -> ScoredToken:
    """A copy of a scored token whose list of likeliest tokens is cut to the first `count`."""
    return ScoredToken(token.token_id, token.chosen, token.top[:count])
