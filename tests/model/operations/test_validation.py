"""Validation: a message for each wrong field, the same in process and over HTTP."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from logitd.model.inference.errors import InvalidRequest
from logitd.model.operations.body import RequestBody
from logitd.model.operations.generate import GenerateRequest
from logitd.model.operations.logits import LogitsRequest
from logitd.model.operations.prompts import clip
from logitd.model.operations.validation import MAX_REPORTED, describe_errors

LARGEST_MESSAGE = 4000
"""Largest message, in bytes of JSON."""


def refused(raw: bytes, model: type[RequestBody] = GenerateRequest) -> InvalidRequest:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(raw)
    error = describe_errors(caught.value, model.model_fields)
    assert len(json.dumps(str(error))) <= LARGEST_MESSAGE
    return error


@pytest.mark.parametrize(
    ("raw", "param", "message"),
    [
        ("{}", "prompt", "prompt is required"),
        ("[]", None, "the body must be a JSON object"),
        ('{"prompt": "a", "temprature": 1}', "temprature",
         "unknown field 'temprature'; did you mean 'temperature'?"),
        ('{"prompt": "a", "zzz": 1}', "zzz", "unknown field 'zzz'"),
        ('{"prompt": "a", "max_new_tokens": 5}', "max_new_tokens",
         "unknown field 'max_new_tokens'; did you mean 'max_tokens'?"),
        ('{"prompt": "a", "inputs": "b"}', "inputs",
         "unknown field 'inputs'; did you mean 'prompt'?"),
        ('{"inputs": "a"}', "prompt",
         "prompt is required; unknown field 'inputs'; did you mean 'prompt'?"),
        ('{"prompt": 5}', "prompt", "prompt must be a string, a list of token ids (integers from "
         "0, 131072 at most), or a list of either (4096 at most)"),
        *((f'{{"prompt": "a", "stop": {stop}}}', "stop", "stop must be a string of 1 to 1024 "
           "characters or a list of such strings (64 at most)") for stop in ("[5]", '""')),
        ('{"prompt": "a", "temperature": NaN}', "temperature",
         "temperature must be a finite number, not NaN"),
        ('{"prompt": "a", "top_p": 0}', "top_p", "top_p must be greater than 0, not 0"),
        ('{"prompt": "a", "n": 1%s}' % ("0" * 100), "n",
         "n must be less than or equal to 4096, not a number of more than 40 digits"),
        ('{"prompt": "a", "stream": "true"}', "stream",
         "stream must be a valid boolean, not 'true'"),
        ('{"prompt": "a", "echo": null}', "echo", "echo must be a valid boolean, not null"),
        ('{"prompt": "a", "min_tokens": [1]}', "min_tokens",
         "min_tokens must be a valid integer, not a list"),
        ('{"prompt": "a", "logprobs_stage": "%s"}' % ("x" * 99), "logprobs_stage",
         f"logprobs_stage must be 'raw' or 'processed', not '{'x' * 40}...'"),
        ('{"prompt": "a", "model": "%s"}' % ("x" * 257), "model",
         "model must have at most 256 characters, not 257"),
        ('{"prompt": "a", "choice": []}', "choice", "choice must have at least 1 item, not 0"),
        ('{"prompt": "a", "interventions": [5]}', "interventions",
         "interventions[0] must be an object, not 5"),
        ('{"prompt": "a", "api_key": "sk-secret"}', "api_key", "unknown field 'api_key'"),
        ('{"prompt": "a", "stop_token_ids": [1, -1]}', "stop_token_ids",
         "stop_token_ids[1] must be greater than or equal to 0, not -1"),
        ('{"prompt": "a"} x', None,
         "the body is not valid JSON: trailing characters at line 1 column 17"),
    ],
)  # fmt: skip
def test_wrong_field_gets_a_message(raw: str, param: str | None, message: str) -> None:
    error = refused(raw.encode())
    assert (error.param, str(error)) == (param, message)


def test_only_fields_of_the_endpoint_are_suggested() -> None:
    error = refused(b'{"prompt": "a", "max_new_tokens": 1}', LogitsRequest)
    assert str(error) == "unknown field 'max_new_tokens'"
    error = refused(b'{"prompt": "a", "stage": "processed", "processing": {"temprature": 1}}',
                    LogitsRequest)  # fmt: skip
    assert str(error) == "unknown field 'processing.temprature'"


def test_suggestions_do_not_block_the_event_loop() -> None:
    """Suggestions are computed only for shown fields, and never for a long name."""
    raw = json.dumps({"prompt": "a"} | {f"temperatur{i}": 1 for i in range(900)}).encode()
    began = time.process_time()
    assert str(refused(raw)).count("did you mean") == MAX_REPORTED
    assert "did you mean" not in str(refused(b'{"prompt": "a", "' + b"prompt" * 1000 + b'": 1}'))
    assert time.process_time() - began < 1


def test_several_wrong_fields_are_named_and_the_rest_is_counted() -> None:
    error = refused(b'{"prompt": "a", "n": 0, "top_k": -1}')
    assert error.param == "top_k"  # in the order of the fields, not of the body
    assert str(error).count("; ") == 1
    many = refused(json.dumps({"prompt": "a"} | {f"x{i}": 1 for i in range(9)}).encode())
    assert str(many).endswith("unknown field 'x4'; and 4 more")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [' + b"null," * 100_000 + b"null]}",
        b'{"prompt": [' + b"-1," * 100_000 + b"-1]}",
        b'{"prompt": [' + b'"",' * 100_000 + b"null]}",
        b'{"prompt": "a", "stop": [' + b"1," * 100_000 + b"1]}",
        b'{"prompt": "a", "stop_token_ids": [' + b"null," * 100_000 + b"1]}",
        b'{"prompt": "a", "allowed_token_ids": [' + b"null," * 100_000 + b"1]}",
        b'{"prompt": "a", "logit_bias": {' + b'"x":"y",' * 100_000 + b'"1":1}}',
        b"{" + b",".join(b'"f%d":1' % i for i in range(100_000)) + b"}",
        b'{"' + b"f" * 100_000 + b'":1}',
    ],
    ids=["nulls", "negative", "mixed", "stop", "stop ids", "allowed", "bias", "fields", "a name"],
)  # fmt: skip
def test_large_body_of_errors_gives_a_small_answer(raw: bytes) -> None:
    refused(raw)


def test_list_is_checked_up_to_its_first_wrong_item() -> None:
    """Checking every item of 4 MB of nulls would block the event loop for seconds."""
    lists: dict[type[RequestBody], tuple[str, ...]] = {
        GenerateRequest: ("prompt", "allowed_token_ids", "stop", "stop_token_ids"),
        LogitsRequest: ("positions", "token_ids"),
    }
    for model, field in ((model, field) for model, fields in lists.items() for field in fields):
        raw = json.dumps({"prompt": "a"} | {field: [None] * 3000}).encode()
        with pytest.raises(ValidationError) as caught:
            model.model_validate_json(raw)
        assert caught.value.error_count() <= 5, field


def test_thousands_of_problems_are_only_counted() -> None:
    error = refused(json.dumps({f"f{i}": 1 for i in range(2000)}).encode())
    assert str(error) == "the body is wrong in 2001 places; /docs describes its fields"


@given(st.text(), st.integers(1, 100))
def test_repeated_text_is_clipped(text: str, limit: int) -> None:
    assert clip(text, limit) == (text if len(text) <= limit else text[:limit] + "...")
