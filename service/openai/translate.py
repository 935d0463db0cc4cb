"""Translation of OpenAI's bodies to bodies of /generate.

Fields with the same name have the same meaning and are copied, unless they are null, which means
the native default. All other fields are translated here.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from logitd.model.inference.errors import InvalidRequest
from logitd.model.operations.generate import GenerateRequest
from logitd.model.operations.prompts import clip
from logitd.model.operations.validation import describe_errors
from logitd.model.text.tokenizer import Tokenizer
from logitd.service.errors import ApiError, bad_request
from logitd.service.http.structure import repeated_key
from logitd.service.openai.chat_schemas import ChatRequest
from logitd.service.openai.schemas import COMPLETION_TOKENS, CompletionRequest, ResponseFormat
from logitd.service.openai.tools import call_schema


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint: its field in OpenAI's body, and the native field's name and value."""

    field: str
    native: str
    value: Any


def native_completion(body: CompletionRequest, constraint: Constraint | None) -> GenerateRequest:
    """The request for /generate. Raises ApiError and InvalidRequest."""
    if body.max_tokens == 0 and not body.echo:
        raise bad_request(
            "max_tokens is 0 and echo is not set, so the reply would be empty. Set echo to true to "
            "get the prompt's logprobs, or raise max_tokens to at least 1",
            "max_tokens",
        )
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _native(body, constraint, {"prompt": body.prompt, "max_tokens": max_tokens})


def native_chat(
    body: ChatRequest,
    prompt: tuple[int, ...],
    tokenizer: Tokenizer,
    constraint: Constraint | None,
) -> GenerateRequest:
    """The request for /generate, with the conversation as token ids. Raises ApiError and
    InvalidRequest."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request(
            f"top_logprobs is {body.top_logprobs}, which needs `logprobs`: set it to true",
            "top_logprobs",
        )
    stop_token_ids = set(body.stop_token_ids or ())
    if not body.ignore_eos:
        # In a template, any special token may end a message; none is part of an answer.
        stop_token_ids |= set(tokenizer.special_tokens.values())
    limits = {body.max_completion_tokens, body.max_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            f"max_completion_tokens is {body.max_completion_tokens} and max_tokens, its older "
            f"name, is {body.max_tokens}; give only one of them",
            "max_completion_tokens",
        )
    return _native(
        body,
        constraint,
        {
            "prompt": list(prompt),
            "max_tokens": next(iter(limits), None),
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "stop_token_ids": sorted(stop_token_ids),
        },
    )


def constraint_of(body: CompletionRequest | ChatRequest) -> Constraint | None:
    """The constraint of a body; None if it has none. Raises ApiError if it has several."""
    found = [*_response_format(body.response_format), *_structured(body), *_tools(body)]
    if len(found) > 1:
        fields = " and ".join(constraint.field for constraint in found)
        raise bad_request(
            f"{fields} are alternatives; give one of them",
            found[1].field,
        )
    return found[0] if found else None


def _response_format(form: ResponseFormat | None) -> Iterator[Constraint]:
    if form is not None and form.type != "text":
        own = form.schema_ or {"type": "object"}
        value = own if form.json_schema is None else form.json_schema.schema_
        yield Constraint("response_format", "json_schema", value)


def _structured(body: CompletionRequest | ChatRequest) -> Iterator[Constraint]:
    own = body.structured_outputs
    if own is not None:
        field = "structured_outputs"
        if own.json_ is not None:
            yield Constraint(field, "json_schema", _schema(own.json_, field))
        if own.json_object:
            yield Constraint(field, "json_schema", {"type": "object"})
        for native in ("regex", "choice", "grammar"):
            if (value := getattr(own, native)) is not None:
                yield Constraint(field, native, value)
    if body.guided_json is not None:
        yield Constraint("guided_json", "json_schema", _schema(body.guided_json, "guided_json"))
    for native in ("regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{native}")) is not None:
            yield Constraint(f"guided_{native}", native, value)


def _schema(given: dict[str, Any] | str, field: str) -> Any:
    if not isinstance(given, str):
        return given
    try:  # as strictly as the body
        schema = from_json(given, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the string in {field} is not JSON: {error}", field) from error
    if not isinstance(schema, dict):
        raise bad_request(f"{field} must be a JSON schema, which is an object", field)
    if (key := repeated_key(given.encode())) is not None:
        message = f"the key {clip(key)!r} is twice in an object of {field}; send it once"
        raise bad_request(message, field)
    return schema


def _tools(body: CompletionRequest | ChatRequest) -> Iterator[Constraint]:
    if not isinstance(body, ChatRequest) or not (functions := body.callable_tools):
        return
    for name in ("stop", "stop_token_ids"):
        if getattr(body, name):
            raise bad_request(
                f"{name} could cut short the call that tool_choice requires; leave {name} out, or "
                "set tool_choice to 'none'",
                name,
            )
    yield Constraint("tools", "json_schema", call_schema(functions))


@contextmanager
def param_names(constraint: Constraint | None, **names: str) -> Iterator[None]:
    """Within this context, make errors and their messages name the client's field instead of the
    native field. `names` maps native names to the client's names; it need not include the
    constraint's field."""
    if constraint is not None:
        names[constraint.native] = constraint.field
    try:
        yield
    except (ApiError, InvalidRequest) as error:
        native = error.param or ""
        error.param = names.get(native, error.param)
        message = error.message if isinstance(error, ApiError) else str(error)
        if native in names:
            message = re.sub(rf"^{native}\b", names[native], message)
        # After "FIELD: ", the compiler's words follow, which name no fields.
        if constraint is not None and not message.startswith(f"{constraint.field}: "):
            message = re.sub(rf"\b{constraint.native}\b", constraint.field, message)
        if isinstance(error, ApiError):
            error.message = message
        else:
            error.args = (message,)
        raise


def _native(
    body: CompletionRequest | ChatRequest, constraint: Constraint | None, fields: dict[str, Any]
) -> GenerateRequest:
    """The native request. `fields` override the body's fields of the same names."""
    shared = GenerateRequest.model_fields.keys() & type(body).model_fields.keys()
    values = {name: value for name in shared if (value := getattr(body, name)) is not None}
    if body.seed is not None and body.seed < -1:
        values["seed"] = body.seed + 2**64  # OpenAI's seeds are signed, native ones are not
    if constraint is not None:
        values[constraint.native] = constraint.value
    try:
        return GenerateRequest.model_validate({**values, **fields})
    except ValidationError as error:
        raise describe_errors(error, GenerateRequest.model_fields) from error
