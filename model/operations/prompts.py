"""Prompts: turn the fields of a body into token ids and positions, and make replies that have an
object for each prompt.

A text that is certainly too long for the context is refused before it is encoded. All other checks
of token ids are in `model/inference/engine/validation.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from logitd.model.inference.engine.requests import Request
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from logitd.model.inference.selection import resolve_indices
from logitd.model.operations.body import PositionChoice, PositionRange
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Record, Subject
from logitd.model.plural import pluralize
from logitd.model.text.tokenizer import (
    NO_VOCABULARY,
    NoVocabularyError,
    Tokenizer,
    TooManyTokens,
)

TokenIds = tuple[int, ...]


def encode_all(
    texts: Sequence[str | Sequence[int]], param: str, subject: Subject
) -> list[TokenIds]:
    """The token ids of each text; lists of ids stay as they are. `param` is the name of the
    field."""
    return [
        encode_within(text, param, subject) if isinstance(text, str) else tuple(text)
        for text in texts
    ]


def encode_within(text: str, param: str, subject: Subject) -> TokenIds:
    """The token ids of a text. Raises ContextLengthExceeded if the context cannot hold them."""
    check_length(text, param, subject)
    try:
        return tuple(encode_text(text, subject.tokenizer, param, limit=subject.context_length))
    except TooManyTokens as error:
        raise _too_long(text, error.least, param, subject) from error


def check_length(text: str, param: str, subject: Subject) -> None:
    """Raise ContextLengthExceeded if a text is certainly too long for the context."""
    least = subject.tokenizer.least_tokens(text)
    if least > subject.context_length:
        raise _too_long(text, least, param, subject)


def _too_long(text: str, least: int, param: str, subject: Subject) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"{_named(param)} has {len(text)} characters, which make at least {least} tokens, but "
        f"the model's context is {subject.context_length}. Shorten it",
        param,
    )


def encode_text(
    text: str,
    tokenizer: Tokenizer,
    param: str = "prompt",
    *,
    special_ids: bool = False,
    limit: float = math.inf,
) -> list[int]:
    """The token ids of a text. Raises InvalidRequest if it cannot be encoded; `param` is the name
    of its field. Raises TooManyTokens as `Tokenizer.encode` does."""
    try:
        return tokenizer.encode(text, special_ids=special_ids, limit=limit)
    except TooManyTokens:
        raise
    except NoVocabularyError as error:
        raise no_vocabulary(param) from error
    except ValueError as error:  # the split pattern gave up on a pathological text
        raise InvalidRequest(f"{_named(param)} cannot be tokenized: {error}", param) from error


def no_vocabulary(param: str) -> InvalidRequest:
    """The error for a string that is sent to a model without a vocabulary; `param` is the name of
    its field."""
    return InvalidRequest(f"{param} is a string, but {NO_VOCABULARY}", param, "no_vocabulary")


def single_token(text: str, tokenizer: Tokenizer, param: str) -> int:
    """The id of a text that is a single token or the name of a special token; `param` is the name
    of its field."""
    if text in tokenizer.special_tokens:
        return tokenizer.special_tokens[text]
    if (least := tokenizer.least_tokens(text)) > 1:  # encoding a long text would take long
        raise InvalidRequest(
            f"{clip(text)!r} is at least {least} tokens; {param} needs a single token", param
        )
    ids = encode_text(text, tokenizer, param)
    if len(ids) != 1:
        raise InvalidRequest(
            f"{clip(text)!r} is {len(ids)} tokens ({clip(str(ids))}); {param} needs a single token",
            param,
        )
    return ids[0]


def resolve_positions(positions: PositionChoice, length: int) -> TokenIds:
    """The chosen positions of a prompt of `length` tokens, counted from the start. Raises
    InvalidRequest if there are none."""
    if not length:
        return ()  # validation rejects an empty prompt
    match positions:
        case "last":
            return (length - 1,)
        case "all":
            return tuple(range(length))
        case PositionRange():
            within = tuple(range(length)[positions.start : positions.to])
            if not within:
                end = "the end" if positions.to is None else positions.to
                raise InvalidRequest(
                    f"there are no positions from {positions.start or 0} to {end} in a prompt "
                    f"of {pluralize(length, 'token')}; `to` itself is not included",
                    "positions",
                )
            return within
        case _:
            return resolve_in_prompt("positions", positions, length)


def resolve_position(position: int, length: int) -> int:
    """A position, counted from the start. Returns 0 for an empty prompt, which validation
    rejects."""
    return resolve_in_prompt("position", [position], length)[0] if length else 0


def resolve_in_prompt(param: str, positions: Sequence[int], length: int) -> tuple[int, ...]:
    """The positions, counted from the start of a prompt of `length` tokens. A negative number in
    `positions` counts from the prompt's end."""
    return resolve_indices(param, positions, length, f"the prompt has {pluralize(length, 'token')}")


def prompts_record(
    requests: Sequence[Request],
    members: Callable[[Any, Computed], dict[str, Any]],
    held: int = 0,
) -> Record:
    """A record whose only member is `prompts`, with the index and the ids of each request's prompt
    and the `members` that follow from its results."""

    def reply(computed: Computed) -> dict[str, Any]:
        prompts = [
            {"index": index, "token_ids": request.token_ids, **members(request, computed)}
            for index, request in enumerate(requests)
        ]
        return {"prompts": prompts}

    return Record(requests, reply, held)


def clip(text: str, limit: int = 80) -> str:
    """Shorten a client's text to fit into a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def _named(param: str) -> str:
    """The noun by which a message refers to a string from the field `param`."""
    names = {"prompt": "the prompt", "messages": "the conversation"}
    return names.get(param, f"one of {param}")
