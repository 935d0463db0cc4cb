"""Prompts: from the texts or ids of a body to token ids, unless there are too many of them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from model.text.tokenizer import Tokenizer
from service.core.errors import bad_request
from service.core.state import Served
from service.requests.submit import check_room

THREAD_CHARACTERS = 100_000
"""Longer texts are encoded beside the event loop, not on it."""


async def prompt_ids(
    prompt: Any, served: Served, n: int = 1, param: str = "n"
) -> list[tuple[int, ...]]:
    """The token ids of each prompt of a body, unless they make more sequences than can run, `n`
    for each. `param` is the field that says so."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt:
        raise bad_request("the prompt is empty; give at least one token", "prompt")
    # Before any text is encoded.
    check_room(len(prompt) * n, "prompt" if n == 1 else param, served)
    return [await text_or_ids(one, "prompt", served) for one in prompt]


async def text_or_ids(given: str | Sequence[int], param: str, served: Served) -> tuple[int, ...]:
    """The token ids of one text of a body, or the ids that it gives; at least one."""
    tokenizer = served.checkpoint.tokenizer
    if isinstance(given, str):
        ids = await encode_within(given, param, tokenizer, served.context_length)
    else:
        ids = tuple(given)
    if not ids:
        raise bad_request(f"{_spoken(param)} is empty; give at least one token", param)
    check_ids(param, ids, tokenizer.vocab_size)
    return ids


async def encode_within(
    text: str, param: str, tokenizer: Tokenizer, context: int
) -> tuple[int, ...]:
    """Token ids of a text, unless there are certainly more than the context holds."""
    least = -(-len(text.encode()) // tokenizer.longest_token)
    if least > context:
        raise bad_request(
            f"{_spoken(param)} has {len(text)} characters, at least {least} tokens; the model's "
            f"context is {context}. Shorten it",
            param,
            "context_length_exceeded",
        )
    if len(text) > THREAD_CHARACTERS:
        return tuple(await asyncio.to_thread(encode_text, text, tokenizer, param))
    return tuple(encode_text(text, tokenizer, param))


def encode_text(
    text: str, tokenizer: Tokenizer, param: str = "prompt", *, special_ids: bool = False
) -> list[int]:
    """`Tokenizer.encode`, or the ApiError that says why not; `param` is the text's field."""
    try:
        return tokenizer.encode(text, special_ids=special_ids)
    except ValueError as error:  # the pattern gave up on a pathological text
        raise bad_request(f"{_spoken(param)} cannot be tokenized: {error}", param) from error


def check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if (largest := max(token_ids)) >= vocab_size:
        raise bad_request(
            f"token id {largest} in {param} is outside the vocabulary of {vocab_size} ids "
            f"(0 to {vocab_size - 1})",
            param,
        )


def _spoken(param: str) -> str:
    """A text of a body, in a sentence."""
    return "the prompt" if param == "prompt" else f"one of {param}"
