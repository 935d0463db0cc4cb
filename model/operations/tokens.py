"""Tokens as members of replies: the id, a text for people, the bytes, and what the model says."""

from typing import Any

from pydantic import Field

from logitd.model.inference.engine.events import PromptToken, TokenEvent
from logitd.model.inference.sampling.params import TokenLogprob
from logitd.model.operations.body import ReplyBody
from logitd.model.text.tokenizer import Tokenizer


class TopToken(ReplyBody):
    id: int
    text: str = Field(description="For people; bytes that are not UTF-8 show as U+FFFD.")
    bytes: list[int]
    logprob: float
    rank: int = Field(description="1 is the likeliest.")


class Token(ReplyBody):
    id: int
    text: str
    bytes: list[int]
    logprob: float | None = Field(description="null for the first of a prompt: nothing predicts it")
    rank: int | None
    top: list[TopToken]


class TokenProb(ReplyBody):
    id: int
    text: str
    bytes: list[int]
    prob: float
    logprob: float | None = Field(description="null: dropped by processing, with prob 0.")
    rank: int


def token_json(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """An id with its text for people and its bytes for programs."""
    return {
        "id": token_id,
        "text": tokenizer.token_text(token_id),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def logprob_json(tokenizer: Tokenizer, token: TokenLogprob) -> dict[str, Any]:
    """The TopToken."""
    return {
        **token_json(tokenizer, token.token_id),
        "logprob": token.logprob,
        "rank": token.rank,
    }


def scored_json(tokenizer: Tokenizer, token: PromptToken | TokenEvent) -> dict[str, Any]:
    """The Token; its logprob is null if nothing predicts it."""
    chosen = token.chosen
    return {
        **token_json(tokenizer, token.token_id),
        "logprob": None if chosen is None else chosen.logprob,
        "rank": None if chosen is None else chosen.rank,
        "top": [logprob_json(tokenizer, likely) for likely in token.top],
    }


def first_likeliest(token: PromptToken, count: int) -> PromptToken:
    """A token with only the `count` likeliest in its place."""
    return PromptToken(token.token_id, token.chosen, token.top[:count])
