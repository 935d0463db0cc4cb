"""Errors: their shape and status, without a server."""

import json
import os

import pytest

from logitd.model.inference.engine.events import (
    GRADIENTS_NOT_FINITE,
    FinishEvent,
    FinishReason,
    SequenceTimes,
)
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from logitd.model.inference.sampling.sampler import NOT_FINITE
from logitd.service.engine.admission import Limit, QueueFull
from logitd.service.engine.submission import EngineStopped
from logitd.service.errors import (
    ApiError,
    as_api_error,
    bad_request,
    internal_error,
    raise_failure,
    unavailable,
)
from logitd.service.http.schemas import ModelStatus


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


def failure(event: FinishEvent) -> ApiError | None:
    """The error that a client gets if its sequence ends with this event; None if it gets none."""
    try:
        raise_failure(event)
    except ApiError as error:
        return error
    return None


def test_paths_that_are_not_utf8_are_reported() -> None:
    """Python represents their bytes as surrogates, which JSON cannot contain: 500 was answered."""
    path = os.fsdecode(b"no\xffwhere")
    body = json.loads(bytes(unavailable(f"{path} does not exist").response().body))
    assert body["error"]["message"] == "no?where does not exist"
    status = ModelStatus(model="m", status="failed", reason=f"{path} does not exist")
    assert "no?where does not exist" in status.model_dump_json()


@pytest.mark.parametrize("cause", [NOT_FINITE.message, GRADIENTS_NOT_FINITE])
def test_numbers_that_are_not_finite_are_named_as_the_cause(cause: str) -> None:
    error = failure(finished(FinishReason.ERROR, cause))
    assert error is not None
    assert "not finite" in error.message
    assert "checkpoint" in error.message


# The shape


def test_retry_after_is_a_header() -> None:
    assert unavailable("m").response().headers["retry-after"] == "1"
    assert "retry-after" not in bad_request("m").response().headers


def test_error_that_would_recur_asks_for_no_retry() -> None:
    """Without the header `x-should-retry: false`, openai's client retries a request twice after a
    500."""
    engine = failure(finished(FinishReason.ERROR, "the model failed"))
    assert engine is not None
    for error in (engine, internal_error("abc")):
        assert error.response().headers["x-should-retry"] == "false"
    for error in (unavailable("m"), bad_request("m")):
        assert "x-should-retry" not in error.response().headers


# From the engine


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_sequence_with_an_answer_is_no_error(reason: FinishReason) -> None:
    assert failure(finished(reason)) is None


@pytest.mark.parametrize(
    ("reason", "status", "code", "retry_after"),
    [
        (FinishReason.TIMEOUT, 504, "deadline_exceeded", None),
        (FinishReason.ABORT, 503, "unavailable", 1),
        (FinishReason.ERROR, 500, "engine", None),
    ],
)
def test_sequence_without_an_answer_is_an_error(
    reason: FinishReason, status: int, code: str, retry_after: int | None
) -> None:
    error = failure(finished(reason, error="secret/path: boom"))
    assert error is not None
    assert (error.status, error.code, error.retry_after) == (status, code, retry_after)
    assert "secret" not in json.dumps(error.body()), "the engine's reason is for the log only"
    if reason is FinishReason.TIMEOUT:
        assert error.message == "the request's timeout expired with 11 tokens generated"


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
def test_errors_of_lower_layers_have_a_status(
    error: InvalidRequest | QueueFull | EngineStopped, status: int, kind: str, param: str | None,
    code: str | None, retry_after: int | None,
) -> None:  # fmt: skip
    translated = as_api_error(error)
    assert (translated.status, translated.type) == (status, kind)
    assert (translated.param, translated.code) == (param, code)
    assert translated.retry_after == retry_after
    assert translated.message.startswith(str(error))
