"""Encode: from the texts or ids of a body to token ids.

A text that certainly has more tokens than the context holds is rejected before it is encoded.
Everything else about its ids is checked when the request is submitted
(`model/inference/engine/validation.py`).
"""

import asyncio
from collections.abc import Sequence

from logitd.model.inference.errors import ContextLengthExceeded
from logitd.model.text.tokenizer import NO_VOCABULARY, NoVocabularyError, Tokenizer
from logitd.service.core.errors import ApiError, bad_request
from logitd.service.core.models import Served

THREAD_CHARACTERS = 100_000
"""Longer texts are encoded in a thread, off the event loop."""


async def encode_all(
    texts: Sequence[str | Sequence[int]], param: str, served: Served
) -> list[tuple[int, ...]]:
    """The token ids of texts of a body, or the ids that it gives; `param` is their field."""
    tokenizer, context_length = served.checkpoint.tokenizer, served.context_length
    return [
        await encode_within(text, param, tokenizer, context_length)
        if isinstance(text, str)
        else tuple(text)
        for text in texts
    ]


async def encode_within(
    text: str, param: str, tokenizer: Tokenizer, context_length: int
) -> tuple[int, ...]:
    """Token ids of a text, unless there are certainly more than the context holds."""
    least = tokenizer.least_tokens(text)
    if least > context_length:
        raise ContextLengthExceeded(
            f"{_subject(param)} has {len(text)} characters, at least {least} tokens; the model's "
            f"context is {context_length}. Shorten it",
            param,
        )
    if len(text) > THREAD_CHARACTERS:
        return tuple(await asyncio.to_thread(encode_text, text, tokenizer, param))
    return tuple(encode_text(text, tokenizer, param))


def encode_text(
    text: str, tokenizer: Tokenizer, param: str = "prompt", *, special_ids: bool = False
) -> list[int]:
    """`Tokenizer.encode`, or an ApiError that says why not; `param` is the text's field."""
    try:
        return tokenizer.encode(text, special_ids=special_ids)
    except NoVocabularyError as error:
        raise no_vocabulary(param) from error
    except ValueError as error:  # the pattern gave up on a pathological text
        raise bad_request(f"{_subject(param)} cannot be tokenized: {error}", param) from error


def no_vocabulary(param: str) -> ApiError:
    """For a text that is sent to a model of token ids alone; `param` is its field."""
    return bad_request(f"{param} is a text, and {NO_VOCABULARY}", param, "no_vocabulary")


def _subject(param: str) -> str:
    """A text of a body, as a sentence names it."""
    return "the prompt" if param == "prompt" else f"one of {param}"
