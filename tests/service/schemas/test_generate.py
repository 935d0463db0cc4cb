"""Schemas: bodies are read strictly, and described for people."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from logitd.service.schemas import generate as schemas
from logitd.service.schemas import tokenizer as tokenizer_schemas
from logitd.service.schemas.base import RequestBody
from logitd.service.schemas.generate import GenerateRequest
from logitd.service.schemas.tensors import LogitsRequest, ProbsRequest
from logitd.service.schemas.tokenizer import DetokenizeRequest, TokenizeRequest

REQUESTS: list[type[RequestBody]] = [
    *(GenerateRequest, LogitsRequest, ProbsRequest, TokenizeRequest, DetokenizeRequest),
]
MODELS = [
    value
    for value in {**vars(schemas), **vars(tokenizer_schemas)}.values()
    if isinstance(value, type) and issubclass(value, BaseModel) and value is not BaseModel
]
NUMBERS = [
    (model, name)
    for model in REQUESTS
    for name, field in model.model_fields.items()
    if field.annotation in (int, float, int | None, float | None)
]


def read(model: type[RequestBody], **fields: Any) -> Any:
    return model.model_validate_json(json.dumps({"prompt": "a", **fields}))


@pytest.mark.parametrize("model", REQUESTS)
def test_examples_are_accepted_and_differ(model: type[RequestBody]) -> None:
    bodies = [model.model_validate_json(json.dumps(one)) for one in model.examples.values()]
    assert len({body.model_dump_json() for body in bodies}) == len(bodies) >= 2
    assert all(len(summary.split()) > 2 for summary in model.examples)


@pytest.mark.parametrize("model", REQUESTS)
def test_every_model_and_field_of_a_request_is_described(model: type[RequestBody]) -> None:
    schema = model.model_json_schema()
    assert schema["description"]
    missing = [name for name, field in schema["properties"].items() if "description" not in field]
    assert missing == []


@pytest.mark.parametrize("model", MODELS)
def test_no_model_takes_what_it_does_not_know(model: type[BaseModel]) -> None:
    assert model.model_config["extra"] == "forbid"


@pytest.mark.parametrize(("model", "name"), NUMBERS)
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "true", '"1"', "[1]", "{}",
              "-1e300", "1" + "0" * 400, "-" + "9" * 5000],
    ids=lambda value: value[:9],
)  # fmt: skip
def test_no_number_takes_what_is_none(model: type[RequestBody], name: str, value: str) -> None:
    with pytest.raises(ValidationError):
        model.model_validate_json(f'{{"prompt": "a", "{name}": {value}}}')


@pytest.mark.parametrize(("model", "name"), NUMBERS)
def test_whole_numbers_are_whole(model: type[RequestBody], name: str) -> None:
    if model.model_fields[name].annotation in (int, int | None):
        with pytest.raises(ValidationError):
            read(model, **{name: 1.5})
        assert getattr(read(model, **{name: 1}), name) == 1
    else:
        assert getattr(read(model, **{name: 1}), name) == 1.0, "1 is a good way to write 1.0"


@pytest.mark.parametrize(
    "raw",
    [b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "\xff"}',
     b'{"prompt": "\xed\xa0\x80"}', b'\xef\xbb\xbf{"prompt": "a"}', '{"n": 1}'.encode("utf-16"),
     b'{"prompt": "a"}{}', b'{"prompt": "a",}', b"{'prompt': 'a'}", b'{"prompt": ' + b"[" * 10_000,
     b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", b"", b"prompt=a", b'"prompt"', b"null"],
)  # fmt: skip
def test_what_is_no_json_object_in_utf8_is_refused(raw: bytes) -> None:
    for model in REQUESTS:
        with pytest.raises(ValidationError):
            model.model_validate_json(raw)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_any_text_is_a_prompt(text: str) -> None:
    for ascii_only in (True, False):
        raw = json.dumps({"prompt": text}, ensure_ascii=ascii_only).encode()
        assert GenerateRequest.model_validate_json(raw).prompt == text


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "null"])
def test_no_bias_takes_what_is_no_number(value: str) -> None:
    with pytest.raises(ValidationError, match="logit_bias"):
        GenerateRequest.model_validate_json(f'{{"prompt": "a", "logit_bias": {{"1": {value}}}}}')


@pytest.mark.parametrize(
    "prompt", ["a", [], [0], [1, 2, 3], ["a"], [[1], "a", []], ["a", [1, 2]], [[1, 2], [3]]]
)
def test_a_prompt_is_read_as_it_is_written(prompt: Any) -> None:
    assert read(GenerateRequest, prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    "prompt",
    [None, 1, {}, True, [None], [1, "a"], ["a", 1], [[["a"]]], [[1.0]], [1.5], [-1], [[-1]],
     [2**31], [10**30], [True], ["a", None], [["a"]]],
)  # fmt: skip
def test_no_other_prompt_is_taken(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        read(GenerateRequest, prompt=prompt)


@pytest.mark.parametrize(
    ("stop", "texts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([], []), (["x"] * 64, ["x"] * 64)]
)
def test_stop_texts(stop: Any, texts: list[str]) -> None:
    assert read(GenerateRequest, stop=stop).stop_texts == texts


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a"] * 65, "a" * 1025, ["a" * 1025], [[]], None])
def test_stop_texts_are_few_short_and_not_empty(stop: Any) -> None:
    with pytest.raises(ValidationError):
        read(GenerateRequest, stop=stop)


def test_columns_are_chosen_once() -> None:
    for model in (LogitsRequest, ProbsRequest):
        with pytest.raises(ValidationError, match="give one of them"):
            read(model, token_ids=[1], top_k=1)
        with pytest.raises(ValidationError):
            read(model, token_ids=[])


@pytest.mark.parametrize("positions", ["last", "all", [0], [-1, 5], [0] * 9])
def test_positions(positions: Any) -> None:
    assert read(LogitsRequest, positions=positions).positions == positions


@pytest.mark.parametrize(
    "positions",
    [[], "first", "", 0, [0.5], ["last"], [True], [2**31], [-(10**40)], None, {}, {"at": 1}],
)
def test_no_other_positions_are_taken(positions: Any) -> None:
    with pytest.raises(ValidationError):
        read(LogitsRequest, positions=positions)


@pytest.mark.parametrize("name", ["inputs", "max_new_tokens"])
def test_names_of_other_servers_are_unknown(name: str) -> None:
    for model in (GenerateRequest, LogitsRequest, ProbsRequest):
        with pytest.raises(ValidationError) as caught:
            model.model_validate_json(json.dumps({"prompt": "a", name: "b"}))
        assert [(e["type"], e["loc"]) for e in caught.value.errors()] == [
            ("extra_forbidden", (name,))
        ]


def test_bodies_do_not_change_once_read() -> None:
    body = read(GenerateRequest)
    with pytest.raises(ValidationError):
        body.n = 5
