"""Schemas of the endpoints that need the vocabulary alone: /tokenize, /detokenize and
/tokenizer_info.

Bodies and replies as in `generate.py`, whose rules they follow.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from logitd.service.schemas.base import (
    MAX_PROMPTS,
    Examples,
    ModelName,
    ReplyBody,
    RequestBody,
    TokenIds,
)
from logitd.service.schemas.generate import CheckpointName

MAX_PIECES = 2**14
"""Tokens that one reply describes one by one: about a megabyte and a half of JSON."""


class TokenizeRequest(RequestBody):
    """Turn texts into token ids. No token is added."""

    examples: ClassVar[Examples] = {
        "Each token with the characters that it touches": {"prompt": "naïve 😀"},
        "The ids of two texts and nothing more": {
            "prompt": ["def main():", "<|endoftext|>"],
            "pieces": False,
        },
        "As it stands in a prompt of /generate": {
            "prompt": "<|endoftext|>",
            "special_tokens": "text",
        },
    }

    prompt: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] = Field(
        description="A text, or a list of texts.",
    )
    special_tokens: Literal["ids", "text"] = Field(
        "ids",
        description="What the name of a special token becomes: its id, or, as in the prompts of "
        "every other endpoint, plain text.",
    )
    pieces: bool | None = Field(
        None,
        description="Whether each token is described. Absent: when there are at most "
        f"{MAX_PIECES} together, and `pieces` of the reply is null when there are more.",
    )
    add_special_tokens: bool = Field(False, description="Only false: no token is added to a text.")
    model: ModelName = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _only_texts(cls, prompt: Any) -> Any:
        texts = prompt if isinstance(prompt, list) else [prompt]
        if not 1 <= len(texts) <= MAX_PROMPTS or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"this endpoint takes a text or a list of 1 to {MAX_PROMPTS} texts; token ids are "
                "what /detokenize takes"
            )
        return prompt

    @field_validator("add_special_tokens")
    @classmethod
    def _nothing_added(cls, add_special_tokens: bool) -> bool:
        if add_special_tokens:
            raise ValueError(
                "add_special_tokens is true, but this vocabulary adds no token to a text; write "
                "the name of a special token into the text where it belongs"
            )
        return add_special_tokens


class Piece(ReplyBody):
    id: int
    text: str = Field(description="For people; bytes that are not UTF-8 show as U+FFFD.")
    bytes: list[int]
    start: int = Field(description="The first character that the token touches.")
    end: int = Field(description="The one after the last: a token may hold half a character.")
    special: bool


class TokenizeReply(ReplyBody):
    id: str
    created: int
    model: str
    checkpoint: CheckpointName
    tokens: list[int]
    count: int
    pieces: list[Piece] | None


class PromptTokens(ReplyBody):
    index: int
    tokens: list[int]
    count: int
    pieces: list[Piece] | None


class TokenizeListReply(ReplyBody):
    id: str
    created: int
    model: str
    checkpoint: CheckpointName
    prompts: list[PromptTokens]


class DetokenizeRequest(RequestBody):
    """Turn token ids into text."""

    examples: ClassVar[Examples] = {
        "The text of four ids": {"tokens": [72, 101, 108, 112]},
        "Two lists of ids": {"tokens": [[72, 105], [104, 111]]},
    }

    tokens: TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)] = (
        Field(description="A list of token ids, or a list of such lists.")
    )
    model: ModelName = None


class DetokenizeReply(ReplyBody):
    id: str
    created: int
    model: str
    checkpoint: CheckpointName
    prompt: str = Field(description="The text; bytes that are not UTF-8 show as U+FFFD.")
    bytes: list[int]


class PromptText(ReplyBody):
    index: int
    prompt: str
    bytes: list[int]


class DetokenizeListReply(ReplyBody):
    id: str
    created: int
    model: str
    checkpoint: CheckpointName
    prompts: list[PromptText]


class TokenizerInfo(ReplyBody):
    model: str
    checkpoint: CheckpointName
    vocab_size: int
    kind: Literal["bpe", "pieces", "words", "none"] = Field(
        description="How a text becomes ids: cut and merged (bpe), cut into tokens (pieces), cut "
        "into words that white space separates (words), or not at all (none): then there are token "
        "ids alone, and texts are rejected."
    )
    eos_token: str | None = Field(description="The token that ends a text, by name.")
    eos_token_id: int | None
    bos_token: str | None = Field(description="null: a text does not begin with a special token.")
    pad_token: str | None
    chat_template: str | None
    pattern: str = Field(description="The regular expression that cuts a text; empty of kind none.")
    special_tokens: dict[str, int]
