"""Errors: one shape, small, with a sentence; without a server."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from logitd.model.inference.engine.events import FinishEvent, FinishReason, SequenceTimes
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from logitd.service.core.errors import (
    MAX_REPORTED,
    ApiError,
    as_api_error,
    bad_request,
    body_too_large,
    client_gone,
    clip,
    from_finish,
    from_validation,
    internal_error,
    unavailable,
)
from logitd.service.engine.admission import Limit, QueueFull
from logitd.service.engine.submission import EngineStopped
from logitd.service.schemas.base import ErrorReply, RequestBody
from logitd.service.schemas.generate import GenerateRequest
from logitd.service.schemas.tensors import LogitsRequest

LARGEST_BODY = 4096
"""Bytes that an error may take, whatever was sent."""


def refused(raw: bytes, model: type[RequestBody] = GenerateRequest) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(raw)
    error = from_validation(caught.value, model.model_fields)
    assert error.status == 400
    ErrorReply.model_validate(error.body())
    assert len(error.response().body) <= LARGEST_BODY
    return error


def finished(reason: FinishReason, error: str | None = None) -> FinishEvent:
    return FinishEvent(
        request_id="gen-1",
        index=0,
        reason=reason,
        times=SequenceTimes(1.0, 1.5, None, 3.5),
        prompt_tokens=3,
        cached_tokens=0,
        completion_tokens=11,
        error=error,
    )


# The shape


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (bad_request("m", "prompt"), 400, "invalid_request_error"),
        (body_too_large(5), 413, "invalid_request_error"),
        (client_gone(), 499, "invalid_request_error"),
        (internal_error("id"), 500, "server_error"),
        (unavailable("m"), 503, "unavailable_error"),
    ],
)
def test_an_error_is_json_of_one_shape(error: ApiError, status: int, kind: str) -> None:
    response = error.response()
    body = json.loads(bytes(response.body))
    ErrorReply.model_validate(body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert body["error"]["type"] == kind


def test_only_what_may_be_tried_again_says_when() -> None:
    assert unavailable("m", 7).response().headers["retry-after"] == "7"
    assert "retry-after" not in bad_request("m").response().headers


def test_what_will_fail_again_is_not_to_be_sent_again() -> None:
    """openai's client sends every 500 three times unless it is told."""
    engine = from_finish(finished(FinishReason.ERROR, "the model failed"))
    assert engine is not None
    for error in (engine, internal_error("abc")):
        assert error.response().headers["x-should-retry"] == "false"
    for error in (unavailable("m"), bad_request("m")):
        assert "x-should-retry" not in error.response().headers


def test_our_own_bug_tells_the_request_id_and_nothing_else() -> None:
    assert internal_error("abc").body()["error"]["message"] == (
        "internal error; the log has it under the request id abc"
    )


# From a body that does not fit


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
        ('{"prompt": "a", "stop": [5]}', "stop",
         "stop must be a string or a list of strings (64 at most)"),
        ('{"prompt": "a", "stop": ""}', "stop",
         "stop has an empty text, which would end every completion at once"),
        ('{"prompt": "a", "temperature": NaN}', "temperature",
         "temperature: Input should be a finite number"),
        ('{"prompt": "a", "top_p": 0}', "top_p", "top_p: Input should be greater than 0"),
        ('{"prompt": "a", "stop_token_ids": [1, -1]}', "stop_token_ids",
         "stop_token_ids.1: Input should be greater than or equal to 0"),
        ('{"prompt": "a"} x', None,
         "the body is not valid JSON: trailing characters at line 1 column 17"),
    ],
)  # fmt: skip
def test_a_wrong_field_gets_a_sentence(raw: str, param: str | None, message: str) -> None:
    error = refused(raw.encode())
    assert (error.param, error.message) == (param, message)


def test_only_fields_of_the_endpoint_are_suggested() -> None:
    error = refused(b'{"prompt": "a", "max_new_tokens": 1}', LogitsRequest)
    assert error.message == "unknown field 'max_new_tokens'"
    error = refused(b'{"prompt": "a", "stage": "processed", "processing": {"temprature": 1}}',
                    LogitsRequest)  # fmt: skip
    assert error.message == "unknown field 'processing.temprature'"


def test_to_look_for_suggestions_holds_up_nobody() -> None:
    """Only for those that are named; a long name is like none of ours."""
    raw = json.dumps({"prompt": "a"} | {f"temperatur{i}": 1 for i in range(900)}).encode()
    began = time.monotonic()
    assert refused(raw).message.count("did you mean") == MAX_REPORTED
    assert "did you mean" not in refused(b'{"prompt": "a", "' + b"prompt" * 1000 + b'": 1}').message
    assert time.monotonic() - began < 1


def test_several_wrong_fields_are_named_and_the_rest_is_counted() -> None:
    error = refused(b'{"prompt": "a", "n": 0, "top_k": -1}')
    assert error.param == "top_k"  # in the order of the fields, not of the body
    assert error.message.count("; ") == 1
    many = refused(json.dumps({"prompt": "a"} | {f"x{i}": 1 for i in range(9)}).encode())
    assert many.message.endswith("unknown field 'x4'; and 4 more")


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
def test_a_large_body_of_errors_gives_a_small_answer(raw: bytes) -> None:
    refused(raw)


def test_a_list_is_checked_no_further_than_its_first_wrong_item() -> None:
    """Otherwise 4 MB of nulls would hold the event loop for seconds."""
    lists: dict[type[RequestBody], tuple[str, ...]] = {
        GenerateRequest: ("prompt", "allowed_token_ids", "stop", "stop_token_ids"),
        LogitsRequest: ("positions", "token_ids"),
    }
    for model, field in ((model, field) for model, fields in lists.items() for field in fields):
        raw = json.dumps({"prompt": "a"} | {field: [None] * 3000}).encode()
        with pytest.raises(ValidationError) as caught:
            model.model_validate_json(raw)
        assert caught.value.error_count() <= 5, field


def test_more_problems_than_anyone_reads_are_counted() -> None:
    error = refused(json.dumps({f"f{i}": 1 for i in range(2000)}).encode())
    assert error.message == "the body is wrong in 2001 places; /docs describes its fields"


@given(st.text(), st.integers(1, 100))
def test_what_is_repeated_is_clipped(text: str, limit: int) -> None:
    assert clip(text, limit) == (text if len(text) <= limit else text[:limit] + "...")


# From the engine


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_answer_is_no_error(reason: FinishReason) -> None:
    assert from_finish(finished(reason)) is None


def test_a_deadline_is_504_with_the_numbers() -> None:
    error = from_finish(finished(FinishReason.TIMEOUT))
    assert error is not None
    assert (error.status, error.code, error.param) == (504, "deadline_exceeded", "timeout")
    assert "after 2.5 s" in error.message
    assert "11 tokens" in error.message


def test_an_abort_that_the_client_did_not_ask_for_is_503() -> None:
    error = from_finish(finished(FinishReason.ABORT))
    assert error is not None
    assert (error.status, error.retry_after) == (503, 1)


def test_the_engines_reason_is_for_the_log_alone() -> None:
    error = from_finish(finished(FinishReason.ERROR, error="secret/path: boom"))
    assert error is not None
    assert error.status == 500
    assert "secret" not in json.dumps(error.body())


def test_every_reason_has_its_answer() -> None:
    for reason in FinishReason:
        from_finish(finished(reason))


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code", "retry_after"),
    [
        (InvalidRequest("m", "top_k"), 400, "invalid_request_error", "top_k", None, None),
        (ContextLengthExceeded("m", "prompt"), 400, "invalid_request_error", "prompt",
         "context_length_exceeded", None),
        (QueueFull("m", 5, 7, Limit.TOKENS), 429, "rate_limit_error", None, "queue_full", 7),
        (EngineStopped("m"), 503, "unavailable_error", None, "unavailable", 1),
    ],
)  # fmt: skip
def test_what_lower_layers_raise_has_its_status(
    error: InvalidRequest | QueueFull | EngineStopped, status: int, kind: str, param: str | None,
    code: str | None, retry_after: int | None,
) -> None:  # fmt: skip
    translated = as_api_error(error)
    assert (translated.status, translated.type) == (status, kind)
    assert (translated.param, translated.code) == (param, code)
    assert translated.retry_after == retry_after
    assert translated.message.startswith(str(error))


def test_a_translated_error_stays_as_it_is() -> None:
    error = bad_request("m")
    assert as_api_error(error) is error


def test_a_full_queue_says_when_to_come_back() -> None:
    error = as_api_error(QueueFull("5 sequences are waiting", 4, 7, Limit.SEQUENCES))
    assert error.limit is Limit.SEQUENCES
    assert error.message == ("5 sequences are waiting, the queue holds 4; try again in about 7 s")
