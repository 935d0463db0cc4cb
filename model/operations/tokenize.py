"""Tokenize texts and decode token ids. Only the vocabulary is needed.

The model computes nothing, so nothing is queued. Evaluation tools that support a "remote tokenizer"
can read these replies. Texts may be longer than the model's context; only the sizes of the body and
of the reply are limited.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from logitd.model.inference.errors import InvalidRequest
from logitd.model.operations.body import (
    MAX_PROMPTS,
    Examples,
    ModelBody,
    Reply,
    ReplyBody,
    TokenIds,
)
from logitd.model.operations.operation import Operation, Planning, Record, Subject
from logitd.model.operations.prompts import encode_text
from logitd.model.operations.tokens import NamedToken, token_json
from logitd.model.text.tokenizer import NO_VOCABULARY, Tokenizer, TokenizerError

MAX_PIECES = 2**14
"""Maximum number of tokens that one reply describes one by one. The JSON of so many tokens takes
about 1.5 MB."""

MAX_UNKNOWN = 2**17
"""Maximum length of a text, in characters, if the vocabulary's split pattern is not known to take
linear time."""


class TokenizeRequest(ModelBody):
    """Turn texts into token ids. No special tokens are added."""

    examples: ClassVar[Examples] = {
        "Each token with its bytes and characters": {"prompt": "naïve 😀"},
        "Only the ids of two texts": {
            "prompt": ["def main():", "<|endoftext|>"],
            "pieces": False,
        },
        "Special tokens as text, as in a prompt of /generate": {
            "prompt": "<|endoftext|>",
            "special_tokens": "text",
        },
    }

    prompt: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] = Field(
        description="A text, or a list of texts.",
    )
    special_tokens: Literal["ids", "text"] = Field(
        "ids",
        description="ids: the name of a special token becomes its id. text: it is plain text, as "
        "in the prompts of every other endpoint.",
    )
    pieces: bool | None = Field(
        None,
        description=f"Describe each token. Absent: true if there are at most {MAX_PIECES} tokens "
        "in total; otherwise `pieces` of the reply is null.",
    )
    add_special_tokens: bool = Field(
        False, description="Must be false: no token is added to a text."
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _only_texts(cls, prompt: Any) -> Any:
        texts = prompt if isinstance(prompt, list) else [prompt]
        if not 1 <= len(texts) <= MAX_PROMPTS or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"prompt must be a text or a list of 1 to {MAX_PROMPTS} texts; /detokenize takes "
                "token ids"
            )
        return prompt

    @field_validator("add_special_tokens")
    @classmethod
    def _nothing_added(cls, add_special_tokens: bool) -> bool:
        if add_special_tokens:
            raise ValueError(
                "add_special_tokens is true, but this vocabulary adds no token to a text; set it "
                "to false, and write the names of special tokens into the text"
            )
        return add_special_tokens

    @property
    def texts(self) -> Sequence[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class Piece(NamedToken):
    """A token. It may be only a part of a character."""

    start: int = Field(description="Index of the first character of which the token has bytes.")
    end: int = Field(description="Index after the last character of which the token has bytes.")
    special: bool


class EncodedText(ReplyBody):
    tokens: list[int]
    count: int
    pieces: list[Piece] | None


class TokenizeReply(Reply, EncodedText):
    """The ids of one text."""


class PromptTokens(EncodedText):
    index: int


class TokenizeListReply(Reply):
    prompts: list[PromptTokens]


class DetokenizeRequest(ModelBody):
    """Turn token ids into text."""

    examples: ClassVar[Examples] = {
        "The text of four ids": {"tokens": [72, 101, 108, 112]},
        "Two lists of ids": {"tokens": [[72, 105], [104, 111]]},
    }

    tokens: TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)] = (
        Field(description="A list of token ids, or a list of such lists.")
    )

    @property
    def many(self) -> bool:
        """True for a list of lists. An empty list counts as a list without ids."""
        return bool(self.tokens) and isinstance(self.tokens[0], list)

    @property
    def lists(self) -> Sequence[Sequence[int]]:
        lists: Any = self.tokens if self.many else [self.tokens]
        return lists


class DecodedText(ReplyBody):
    prompt: str = Field(description="The text; bytes that are not UTF-8 become U+FFFD.")
    bytes: list[int]


class DetokenizeReply(Reply, DecodedText):
    """The text of one list of ids."""


class PromptText(DecodedText):
    index: int


class DetokenizeListReply(Reply):
    prompts: list[PromptText]


def plan_tokenize(body: TokenizeRequest, subject: Subject) -> Planning:
    yield from ()
    many = not isinstance(body.prompt, str)
    return Record((), lambda _: _one_or_many(_tokenized(body, subject.tokenizer), many=many))


def plan_detokenize(body: DetokenizeRequest, subject: Subject) -> Planning:
    yield from ()
    return Record((), lambda _: _one_or_many(_detokenized(body.lists, subject), many=body.many))


def _tokenized(body: TokenizeRequest, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    longest = max(map(len, body.texts))
    if longest > MAX_UNKNOWN and not tokenizer.cuts_in_time:
        raise InvalidRequest(
            f"the text has {longest} characters, but the limit is {MAX_UNKNOWN}, because "
            "the vocabulary's split pattern may take quadratic time. Send the text in parts",
            "prompt",
        )
    special_ids = body.special_tokens == "ids"
    encoded = [encode_text(text, tokenizer, special_ids=special_ids) for text in body.texts]
    count = sum(map(len, encoded))
    if body.pieces and count > MAX_PIECES:
        raise InvalidRequest(
            f"the text has {count} tokens, but `pieces` can list at most {MAX_PIECES} in a reply. "
            "Leave `pieces` out, or send less text",
            "pieces",
        )
    described = count <= MAX_PIECES if body.pieces is None else body.pieces
    return [
        {
            "tokens": ids,
            "count": len(ids),
            "pieces": _pieces(ids, text, tokenizer) if described else None,
        }
        for ids, text in zip(encoded, body.texts, strict=True)
    ]


def _pieces(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [
        {
            **token_json(tokenizer, token_id),
            "start": span.start,
            "end": span.end,
            "special": tokenizer.is_special(token_id),
        }
        for token_id, span in zip(ids, tokenizer.spans(ids, text), strict=True)
    ]


def _detokenized(lists: Sequence[Sequence[int]], subject: Subject) -> list[dict[str, Any]]:
    tokenizer, limit = subject.tokenizer, subject.max_text_bytes
    if not tokenizer.has_text:
        raise InvalidRequest(f"the ids have no text: {NO_VOCABULARY}", "tokens", "no_vocabulary")
    try:
        size = sum(len(tokenizer.token_bytes(token_id)) for ids in lists for token_id in ids)
    except TokenizerError as error:
        raise InvalidRequest(str(error), "tokens") from error
    if limit is not None and size > limit:
        raise InvalidRequest(
            f"the text of these ids has {size} bytes, but the limit is {limit}. Send fewer ids, "
            "or raise --max-body-bytes",
            "tokens",
        )
    raw = [tokenizer.decode_bytes(ids) for ids in lists]
    return [{"prompt": text.decode("utf-8", errors="replace"), "bytes": list(text)} for text in raw]


def _one_or_many(results: Sequence[Mapping[str, Any]], *, many: bool) -> dict[str, Any]:
    """The members of the reply. If `many`, the only member is `prompts`, a list of all results;
    otherwise they are the members of the single result."""
    if not many:
        return dict(results[0])
    return {"prompts": [{"index": index, **result} for index, result in enumerate(results)]}


TOKENIZE = Operation(
    name="tokenize",
    body=TokenizeRequest,
    reply=TokenizeReply | TokenizeListReply,
    plan=plan_tokenize,
    form="vocabulary",
    tag="vocabulary",
    id_prefix="tokens",
    summary="Texts to token ids",
    description="""\
The ids of a text, and `pieces`: each token with its bytes and the characters [start, end) of the
text from which they come. For a list of texts, `prompts` has these members for each text.""",
)
DETOKENIZE = Operation(
    name="detokenize",
    body=DetokenizeRequest,
    reply=DetokenizeReply | DetokenizeListReply,
    plan=plan_detokenize,
    form="vocabulary",
    tag="vocabulary",
    id_prefix="tokens",
    summary="Token ids to text",
    description="""\
The text of token ids and its bytes, which are exact even if they are not UTF-8. For a list of
lists, `prompts` has these members for each list.""",
)
