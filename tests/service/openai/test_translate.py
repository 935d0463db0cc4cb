"""Translation of OpenAI's bodies to native ones, field by field."""

import json
from typing import Any, cast

import pytest

from logitd.model.inference.errors import InvalidRequest
from logitd.model.operations.generate import GenerateRequest
from logitd.service.errors import EXPECTED, ApiError, as_api_error, bad_request
from logitd.service.openai.chat_schemas import ChatRequest
from logitd.service.openai.schemas import CompletionRequest
from logitd.service.openai.translate import (
    Constraint,
    constraint_of,
    native_chat,
    native_completion,
    param_names,
)
from tests.model.factories import chat_tokenizer

TOKENIZER = chat_tokenizer()
SHARED: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 3,
    "stream": True,
    "logit_bias": {"5": -1.5},
    "stop": ["a", "b"],
    "seed": 7,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.25,
    "top_k": 11,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "allowed_token_ids": [1, 2],
    "ignore_eos": True,
    "min_tokens": 2,
    "stop_token_ids": [9],
    "logprobs_stage": "processed",
    "priority": -3,
    "timeout": 5.0,
}
"""For each field that both endpoints share with /generate, a value that is not the default."""


def completion(**fields: Any) -> GenerateRequest:
    body = CompletionRequest.model_validate_json(json.dumps({"prompt": "a", **fields}))
    return native_completion(body, constraint_of(body))


def chat(**fields: Any) -> GenerateRequest:
    message = {"role": "user", "content": "a"}
    body = ChatRequest.model_validate_json(json.dumps({"messages": [message], **fields}))
    return native_chat(body, (1, 2), TOKENIZER, constraint_of(body))


def set_fields(native: GenerateRequest) -> dict[str, Any]:
    """Fields whose values differ from an empty request's."""
    nothing = GenerateRequest(prompt="").model_dump()
    return {name: value for name, value in native.model_dump().items() if value != nothing[name]}


def refused(call: Any, **fields: Any) -> ApiError:
    with pytest.raises(EXPECTED) as caught:
        call(**fields)
    error = as_api_error(cast(ApiError, caught.value))
    assert error.status == 400
    return error


def test_fields_of_the_same_name_are_copied() -> None:
    fields = SHARED | {"echo": True, "logprobs": 2, "max_tokens": 5, "logprobs_stage": "raw"}
    wanted = {key: value for key, value in fields.items() if key != "logprobs_stage"}
    assert set_fields(completion(**fields)) == {"prompt": "a", **wanted}
    assert set_fields(chat(**SHARED, logprobs=True, max_tokens=5)) == {
        "prompt": [1, 2],
        "max_tokens": 5,
        "logprobs": 0,
        **SHARED,
    }


def test_null_is_the_native_default() -> None:
    nulls = {name: None for name in CompletionRequest.model_fields if name != "prompt"}
    assert set_fields(completion(**nulls)) == {"prompt": "a", "max_tokens": 16}
    nulls = {name: None for name in ChatRequest.model_fields if name != "messages"}
    assert set_fields(chat(**nulls)) == {"prompt": [1, 2], "stop_token_ids": [256, 257, 258]}


def test_answer_ends_at_special_tokens_by_default() -> None:
    assert chat().stop_token_ids == [256, 257, 258]
    assert chat(stop_token_ids=[300, 7]).stop_token_ids == [7, 256, 257, 258, 300]
    assert chat(ignore_eos=True).stop_token_ids == []


def test_answer_limit_has_two_names() -> None:
    assert chat().max_tokens is None, "what fits"
    for fields in ({"max_tokens": 3}, {"max_completion_tokens": 3},
                   {"max_tokens": 3, "max_completion_tokens": 3}):  # fmt: skip
        assert chat(**fields).max_tokens == 3
    error = refused(chat, max_tokens=3, max_completion_tokens=4)
    assert (error.param, "is 4 and max_tokens" in error.message) == ("max_completion_tokens", True)


def test_options_of_a_stream_change_nothing_without_one() -> None:
    for call in (completion, chat):
        assert call(stream_options={"include_usage": True}) == call()


SCHEMA = {"type": "integer"}
CONSTRAINTS: list[tuple[dict[str, Any], str, str, Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
     "response_format", "json_schema", SCHEMA),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_schema",
     {"type": "object"}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format",
     "json_schema", SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs", "json_schema", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs", "json_schema",
     SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs", "json_schema",
     {"type": "object"}),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs", "regex", "a+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs", "choice", ["a", "b"]),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs", "grammar",
     'start: "a"'),
    ({"guided_json": SCHEMA}, "guided_json", "json_schema", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "guided_json", "json_schema", SCHEMA),
    ({"guided_regex": "a+"}, "guided_regex", "regex", "a+"),
    ({"guided_choice": ["a"]}, "guided_choice", "choice", ["a"]),
    ({"guided_grammar": 'start: "a"'}, "guided_grammar", "grammar", 'start: "a"'),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "own", "native", "value"), CONSTRAINTS)
@pytest.mark.parametrize("call", [completion, chat])
def test_constraints_can_be_given_in_every_way(
    call: Any, fields: dict[str, Any], own: str, native: str, value: Any
) -> None:
    translated = call(**fields)
    assert getattr(translated, native) == value
    others = {"json_schema", "regex", "choice", "grammar"} - {native}
    assert [getattr(translated, other) for other in others] == [None] * 3
    body = CompletionRequest.model_validate_json(json.dumps({"prompt": "a", **fields}))
    assert constraint_of(body) == Constraint(own, native, value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "[" * 30_000}, "guided_json"),
        ({"guided_json": '{"const": NaN}'}, "guided_json"),
        ({"guided_json": '{"const": 1, "const": 2}'}, "guided_json"),
        ({"structured_outputs": {"json": '{"a": {"b": 1, "\\u0062": 2}}'}}, "structured_outputs"),
    ],
)
def test_only_one_readable_constraint_is_accepted(fields: dict[str, Any], param: str) -> None:
    for call in (completion, chat):
        assert refused(call, **fields).param == param


def test_errors_name_the_clients_fields() -> None:
    constraint = Constraint("guided_regex", "regex", "a")
    renamed = {"prompt": "messages", "regex": "guided_regex", "n": "n", None: None}
    for native, own in renamed.items():
        with pytest.raises(ApiError) as caught, param_names(constraint, prompt="messages"):
            raise bad_request("no", native)
        assert caught.value.param == own


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "response_format determines where the text ends, but ignore_eos is true; leave out "
            "response_format or ignore_eos",
        ),
        ({"guided_choice": ["a", "a"]}, "guided_choice lists a text twice; list each once"),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "structured_outputs determines where the text ends, but ignore_eos is true; leave out "
            "structured_outputs or ignore_eos",
        ),
    ],
)
def test_messages_name_the_clients_fields(fields: dict[str, Any], message: str) -> None:
    body = CompletionRequest.model_validate_json(json.dumps({"prompt": "a", **fields}))
    constraint = constraint_of(body)
    with pytest.raises(InvalidRequest) as caught, param_names(constraint):
        native_completion(body, constraint)
    assert str(caught.value) == message
    assert caught.value.param in fields


@pytest.mark.parametrize(
    ("said", "param", "message"),
    [
        ("n and json_schema could forbid", "n", "n and response_format could forbid"),
        ("json_schema: a prompt", "json_schema", "response_format: a prompt"),
        ("logprobs is 41", "logprobs", "top_logprobs is 41"),
        ("top_logprobs needs logprobs", "top_logprobs", "top_logprobs needs logprobs"),
        ("the prompt is too long", "prompt", "the prompt is too long"),
    ],
)
def test_message_names_fields_as_the_client_does(said: str, param: str, message: str) -> None:
    constraint = Constraint("response_format", "json_schema", {})
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    with pytest.raises(InvalidRequest) as caught, param_names(constraint, **names):
        raise InvalidRequest(said, param)
    assert str(caught.value) == message
