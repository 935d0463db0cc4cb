"""Bodies of all operations are validated strictly."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from logitd.model.inference.constraints.compiler import Source
from logitd.model.inference.errors import InvalidRequest
from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.body import ReplyBody, RequestBody
from logitd.model.operations.generate import GenerateRequest, constraint_source

REQUESTS = [operation.body for operation in OPERATIONS]
NUMBERS = [
    pytest.param(model, name, id=f"{model.__name__} {name}")
    for model in REQUESTS
    for name, field in model.model_fields.items()
    if field.annotation in (int, float, int | None, float | None)
]


def read(model: type[RequestBody], **fields: Any) -> Any:
    smallest = {**next(iter(model.examples.values())), **fields}
    return model.model_validate_json(json.dumps(smallest))


def models_of(base: type[BaseModel]) -> list[type[BaseModel]]:
    """All subclasses of a model, including those of the operations."""
    return [one for kind in base.__subclasses__() for one in (kind, *models_of(kind))]


def test_models_refuse_unknown_fields_and_are_frozen() -> None:
    requests, replies = models_of(RequestBody), models_of(ReplyBody)
    assert {*REQUESTS} < {*requests}
    assert len(replies) > 30
    for model in (*requests, *replies):
        assert model.model_config["extra"] == "forbid", model
    body = read(GenerateRequest)
    with pytest.raises(ValidationError):
        body.n = 5


@pytest.mark.parametrize(("model", "name"), NUMBERS)
def test_numbers_refuse_other_types(model: type[RequestBody], name: str) -> None:
    smallest = json.dumps(next(iter(model.examples.values())))[:-1]
    for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "true", '"1"', "[1]", "{}",
                  "-1e300", "1" + "0" * 400, "-" + "9" * 5000):  # fmt: skip
        with pytest.raises(ValidationError):
            model.model_validate_json(f'{smallest}, "{name}": {value}}}')


@pytest.mark.parametrize(("model", "name"), NUMBERS)
def test_whole_numbers_are_whole(model: type[RequestBody], name: str) -> None:
    annotation = model.model_fields[name].annotation
    if annotation in (float, float | None):
        assert getattr(read(model, **{name: 1}), name) == 1.0, "1 is a good way to write 1.0"
        return
    with pytest.raises(ValidationError) as caught:
        read(model, **{name: 1.5})
    assert {error["loc"][0] for error in caught.value.errors()} == {name}


@pytest.mark.parametrize(
    "raw",
    [b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "\xff"}',
     b'{"prompt": "\xed\xa0\x80"}', b'\xef\xbb\xbf{"prompt": "a"}', '{"n": 1}'.encode("utf-16"),
     b'{"prompt": "\xc0\xaf"}', b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": "a"',
     b'{"prompt": "a" /* text */}', b'{"prompt": "a\nb"}', b'{"prompt": "a", "nothing": NaN}',
     b'{"prompt": "a"}{}', b'{"prompt": "a",}', b"{'prompt': 'a'}", b'{"prompt": ' + b"[" * 10_000,
     b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", b"", b"prompt=a", b'"prompt"', b"null"],
)  # fmt: skip
def test_body_that_is_no_json_object_in_utf8_is_refused(raw: bytes) -> None:
    for model in REQUESTS:
        with pytest.raises(ValidationError):
            model.model_validate_json(raw)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_any_text_is_a_prompt(text: str) -> None:
    for ascii_only in (True, False):
        raw = json.dumps({"prompt": text}, ensure_ascii=ascii_only).encode()
        assert GenerateRequest.model_validate_json(raw).prompt == text


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "null"])
def test_bias_must_be_a_number(value: str) -> None:
    with pytest.raises(ValidationError, match="logit_bias"):
        GenerateRequest.model_validate_json(f'{{"prompt": "a", "logit_bias": {{"1": {value}}}}}')


@pytest.mark.parametrize(
    ("stop", "texts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([], []), (["x"] * 64, ["x"] * 64)]
)
def test_stop_strings_are_a_list(stop: Any, texts: list[str]) -> None:
    assert read(GenerateRequest, stop=stop).stop_strings == texts


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a"] * 65, "a" * 1025, ["a" * 1025], [[]], None])
def test_stop_strings_are_few_short_and_not_empty(stop: Any) -> None:
    with pytest.raises(ValidationError):
        read(GenerateRequest, stop=stop)


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({}, None),
        ({"regex": "a"}, Source("regex", "a")),
        ({"grammar": 'start: "a"'}, Source("grammar", 'start: "a"')),
        ({"choice": ["b", "a"]}, Source("choice", '["b", "a"]')),
        ({"json_schema": {"b": 1, "a": 1.0}}, Source("json_schema", '{"b": 1, "a": 1.0}')),
    ],
)
def test_source_of_a_constraint_keeps_every_order(fields: Any, source: Source | None) -> None:
    assert constraint_source(read(GenerateRequest, **fields)) == source


def test_schema_with_an_invalid_json_number_is_refused() -> None:
    body = GenerateRequest.model_validate_json('{"prompt": "x", "json_schema": {"const": 1e999}}')
    with pytest.raises(InvalidRequest, match="number that is too large") as caught:
        constraint_source(body)
    assert caught.value.param == "json_schema"
