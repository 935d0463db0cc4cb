"""From a body of OpenAI's to the native one, which is then handled as /generate does.

Fields of the same name mean the same and are taken over; null is left out, so that the native
default holds. What differs is translated here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from model.inference.errors import InvalidRequest
from model.text.tokenizer import Tokenizer
from service.core.errors import ApiError, bad_request, from_validation
from service.schemas.generate import GenerateRequest
from service.schemas.openai import (
    COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
)


def native_completion(body: CompletionRequest) -> GenerateRequest:
    """The same request for /generate, or ApiError."""
    if body.max_tokens == 0 and not body.echo:
        raise bad_request(
            "max_tokens is 0 and echo is not set: nothing would be returned. Set echo to get the "
            "prompt's logprobs, or let at least one token be generated",
            "max_tokens",
        )
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    # The engine's generations have at least one token; with 0 the reply leaves it out.
    return _native(
        body,
        {
            "prompt": body.prompt,
            "max_tokens": max(1, max_tokens),
            **constraint_fields(body.response_format),
        },
    )


def native_chat(
    body: ChatRequest, prompt: tuple[int, ...], tokenizer: Tokenizer
) -> GenerateRequest:
    """The same request for /generate, with the conversation as token ids; or ApiError."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs goes with logprobs: true", "top_logprobs")
    stop_token_ids = set(body.stop_token_ids or ())
    if not body.ignore_eos:
        # Whatever the template ends a turn with: no special token is part of an answer.
        stop_token_ids |= set(tokenizer.special_tokens.values())
    return _native(
        body,
        {
            "prompt": list(prompt),
            "max_tokens": _one_limit(body),
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "stop_token_ids": sorted(stop_token_ids),
            **constraint_fields(body.response_format),
        },
    )


def constraint_fields(response_format: ResponseFormat | None) -> dict[str, Any]:
    """The native fields that make an answer fit a response_format."""
    if response_format is None or response_format.type == "text":
        return {}
    schema = response_format.json_schema
    return {"json_schema": {"type": "object"} if schema is None else schema.schema_}


@contextmanager
def param_names(**names: str) -> Iterator[None]:
    """Errors raised inside name the client's fields instead of the native ones."""
    try:
        yield
    except (ApiError, InvalidRequest) as error:
        error.param = names.get(error.param or "", error.param)
        raise


def _native(body: CompletionRequest | ChatRequest, fields: dict[str, Any]) -> GenerateRequest:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options goes with stream: true", "stream_options")
    shared = GenerateRequest.model_fields.keys() & type(body).model_fields.keys()
    values = {name: value for name in shared if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        values["seed"] = body.seed % 2**64  # theirs is signed: each has a seed of its own
    try:
        return GenerateRequest.model_validate({**values, **fields})
    except ValidationError as error:
        raise from_validation(error) from error


def _one_limit(body: ChatRequest) -> int | None:
    limits = {body.max_completion_tokens, body.max_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            f"max_completion_tokens is {body.max_completion_tokens} and max_tokens, its older "
            f"name, is {body.max_tokens}; give one of them",
            "max_completion_tokens",
        )
    return max((limit for limit in limits if limit is not None), default=None)
