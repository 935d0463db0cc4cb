"""OpenAI's bodies: null means the default, unsupported fields are refused by name, and the limits
are the same as for /generate.
"""

import json
from typing import Any

import pytest
from annotated_types import BaseMetadata
from pydantic import BaseModel, ValidationError

from logitd.model.operations.body import RequestBody
from logitd.model.operations.generate import GenerateRequest
from logitd.service.openai.chat_schemas import UNSUPPORTED, ChatRequest
from logitd.service.openai.schemas import OTHER_SERVERS, CompletionRequest

REQUESTS: list[type[RequestBody]] = [CompletionRequest, ChatRequest]
SMALLEST: dict[type[RequestBody], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
}
OPTIONAL = [
    (model, name)
    for model in REQUESTS
    for name, field in model.model_fields.items()
    if not field.is_required()
]
NEUTRAL = {**OTHER_SERVERS, **UNSUPPORTED}


def read(model: type[RequestBody], /, **fields: Any) -> Any:
    return model.model_validate_json(json.dumps({**SMALLEST[model], **fields}))


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({"messages": messages, **fields}))


@pytest.mark.parametrize(("model", "name"), OPTIONAL)
def test_null_equals_an_absent_field(model: type[RequestBody], name: str) -> None:
    assert getattr(read(model, **{name: None}), name) is None
    assert getattr(read(model), name) is None


def bounds(model: type[BaseModel], name: str) -> list[Any]:
    return [one for one in model.model_fields[name].metadata if isinstance(one, BaseMetadata)]


@pytest.mark.parametrize("model", REQUESTS)
def test_shared_field_has_generates_meaning(model: type[RequestBody]) -> None:
    """Fields that mean something else in OpenAI's API are excluded."""
    shared = model.model_fields.keys() & GenerateRequest.model_fields.keys()
    assert len(shared) > 15
    for name in shared - {"max_tokens", "seed", "logprobs", "model", "timeout", "prompt"}:
        own, native = model.model_fields[name], GenerateRequest.model_fields[name]
        assert bounds(model, name) == bounds(GenerateRequest, name), name
        if name not in ("n", "echo"):
            assert own.description == native.description


@pytest.mark.parametrize("name", NEUTRAL)
def test_unsupported_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} is not supported") as caught:
        read(ChatRequest, **{name: {"not": "neutral"}})
    assert caught.value.errors()[0]["loc"] == (name,)
    for neutral in NEUTRAL[name]:
        assert getattr(read(ChatRequest, **{name: neutral}), name) is None


def test_neutral_value_must_have_its_type() -> None:
    for name, value in {
        "store": 0,
        "functions": {},
        "parallel_tool_calls": 1,
        "metadata": [],
    }.items():
        with pytest.raises(ValidationError, match=name):
            read(ChatRequest, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("metadata", {"a": "b"}), ("prompt_cache_key", "k"), ("safety_identifier", "s"),
     ("parallel_tool_calls", False), ("prompt_cache_retention", "in_memory"),
     ("guided_decoding_backend", "auto"), ("stream_options", {"include_usage": True}),
     ("tools", []), ("tool_choice", "auto"), ("tool_choice", "none"), ("logit_bias", {}), ("n", 1)],
)  # fmt: skip
def test_field_that_changes_nothing_is_accepted(name: str, value: Any) -> None:
    read(ChatRequest, **{name: value})


# Messages


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "the message has no content"),
        ({"role": "assistant", "tool_calls": []}, "the message has no content"),
        ({"role": "user", "content": 5}, "valid string"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "a part of type 'image_url'; only text parts are supported"),
        ({"role": "user", "content": ["a"]}, "a part of type 'None'"),
        ({"role": "user", "content": [{"type": "text"}]}, "exactly the"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "exactly the"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, "exactly the"),
        ({"role": "user", "content": "a", "tool_call_id": "x"}, "only the role 'tool'"),
        ({"role": "user", "content": "a", "tool_calls": [
            {"id": "x", "function": {"name": "f", "arguments": "{}"}}]}, "the role 'assistant'"),
        ({"role": "function", "content": "a", "name": "f"}, "role"),
        ({"role": "User", "content": "a"}, "role"),
        ({"content": "a"}, "role"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}, "tool_calls"),
        ({"role": "assistant", "content": "a", "refusal": "no"}, "refusal"),
        ({"role": "user", "content": "a", "weight": 1}, "weight"),
    ],
)  # fmt: skip
def test_other_messages_are_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        chat(message)


@pytest.mark.parametrize(
    "form",
    [{}, {"type": "grammar"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}},
     {"type": "text", "json_schema": {"schema": {}}}, "json_object", {"type": "text", "x": 1},
     {"type": "json_schema", "json_schema": {"schema": "{}"}}, {"type": "text", "schema": {}}],
)  # fmt: skip
def test_other_response_formats_are_refused(form: Any) -> None:
    with pytest.raises(ValidationError, match="response_format"):
        read(ChatRequest, response_format=form)
