"""From a body of OpenAI's to the native one, which is then handled as /generate does.

Fields of the same name mean the same and are taken over; null is left out, so that the native
default holds. What differs is translated here.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from logitd.model.inference.errors import InvalidRequest
from logitd.model.operations.generate import GenerateRequest
from logitd.model.operations.validation import describe_errors
from logitd.model.text.tokenizer import Tokenizer
from logitd.service.errors import ApiError, bad_request
from logitd.service.openai.schemas import (
    COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
)
from logitd.service.openai.tools import call_schema


def native_completion(body: CompletionRequest) -> GenerateRequest:
    """The same request for /generate, or ApiError."""
    if body.max_tokens == 0 and not body.echo:
        raise bad_request(
            "max_tokens is 0 and echo is not set: nothing would be returned. Set echo to get the "
            "prompt's logprobs, or let at least one token be generated",
            "max_tokens",
        )
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _native(
        body, {"prompt": body.prompt, "max_tokens": max_tokens, **constraint_fields(body)}
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
            **constraint_fields(body),
        },
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A constraint of a body: its field there, the native one, and what it has to be."""

    field: str
    native: str
    value: Any


def constraint_fields(body: CompletionRequest | ChatRequest) -> dict[str, Any]:
    """The native fields that make an answer fit what a body says of it, or ApiError."""
    asked = _constraint(body)
    return {} if asked is None else {asked.native: asked.value}


def constraint_names(body: CompletionRequest | ChatRequest) -> dict[str, str]:
    """The native field of a body's constraint, with the body's own; for `param_names`."""
    asked = _constraint(body)
    return {} if asked is None else {asked.native: asked.field}


def _constraint(body: CompletionRequest | ChatRequest) -> _Asked | None:
    asked = [*_response_format(body.response_format), *_structured(body), *_tools(body)]
    if len(asked) > 1:
        fields = " and ".join(constraint.field for constraint in asked)
        raise bad_request(f"{fields} each say what the text is; give one of them", asked[1].field)
    return asked[0] if asked else None


def _response_format(form: ResponseFormat | None) -> Iterator[_Asked]:
    if form is not None and form.type != "text":
        own = form.schema_ or {"type": "object"}
        value = own if form.json_schema is None else form.json_schema.schema_
        yield _Asked("response_format", "json_schema", value)


def _structured(body: CompletionRequest | ChatRequest) -> Iterator[_Asked]:
    """vLLM's fields, old and new."""
    own = body.structured_outputs
    if own is not None:
        field = "structured_outputs"
        if own.json_ is not None:
            yield _Asked(field, "json_schema", _schema(own.json_, field))
        if own.json_object:
            yield _Asked(field, "json_schema", {"type": "object"})
        for native in ("regex", "choice", "grammar"):
            if (value := getattr(own, native)) is not None:
                yield _Asked(field, native, value)
    if body.guided_json is not None:
        yield _Asked("guided_json", "json_schema", _schema(body.guided_json, "guided_json"))
    for native in ("regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{native}")) is not None:
            yield _Asked(f"guided_{native}", native, value)


def _schema(given: dict[str, Any] | str, field: str) -> Any:
    """A schema, also where it is given as a string."""
    if not isinstance(given, str):
        return given
    try:
        schema = json.loads(given)
    except ValueError as error:
        raise bad_request(f"{field} has a string that is not JSON: {error}", field) from error
    except RecursionError as error:
        raise bad_request(f"{field} is nested too deeply", field) from error
    if not isinstance(schema, dict):
        raise bad_request(f"{field} has to be a JSON schema, which is an object", field)
    return schema


def _tools(body: CompletionRequest | ChatRequest) -> Iterator[_Asked]:
    if not isinstance(body, ChatRequest) or not (functions := body.callable_tools):
        return
    for name in ("stop", "stop_token_ids"):
        if getattr(body, name):
            raise bad_request(
                f"{name} would cut a call short, which tool_choice says the answer is: leave one "
                "of them out",
                name,
            )
    yield _Asked("tools", "json_schema", call_schema(functions))


@contextmanager
def param_names(**names: str) -> Iterator[None]:
    """Errors raised inside name the client's fields instead of the native ones."""
    try:
        yield
    except (ApiError, InvalidRequest) as error:
        error.param = names.get(error.param or "", error.param)
        raise


def _native(body: CompletionRequest | ChatRequest, fields: dict[str, Any]) -> GenerateRequest:
    shared = GenerateRequest.model_fields.keys() & type(body).model_fields.keys()
    values = {name: value for name in shared if (value := getattr(body, name)) is not None}
    if body.seed is not None and body.seed < -1:
        values["seed"] = body.seed + 2**64  # theirs is signed: each has a seed of its own
    try:
        return GenerateRequest.model_validate({**values, **fields})
    except ValidationError as error:
        raise describe_errors(error) from error


def _one_limit(body: ChatRequest) -> int | None:
    limits = {body.max_completion_tokens, body.max_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            f"max_completion_tokens is {body.max_completion_tokens} and max_tokens, its older "
            f"name, is {body.max_tokens}; give one of them",
            "max_completion_tokens",
        )
    return max((limit for limit in limits if limit is not None), default=None)
