"""Errors: one shape, small, with a sentence; without a server."""

import json

import pytest

from logitd.model.inference.engine.events import FinishEvent, FinishReason, SequenceTimes
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
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
    """The error that a sequence's end means for its client."""
    try:
        raise_failure(event)
    except ApiError as error:
        return error
    return None


# The shape


def test_only_what_may_be_tried_again_says_when() -> None:
    assert unavailable("m", 7).response().headers["retry-after"] == "7"
    assert "retry-after" not in bad_request("m").response().headers


def test_what_will_fail_again_is_not_to_be_sent_again() -> None:
    """openai's client sends every 500 three times unless it is told."""
    engine = failure(finished(FinishReason.ERROR, "the model failed"))
    assert engine is not None
    for error in (engine, internal_error("abc")):
        assert error.response().headers["x-should-retry"] == "false"
    for error in (unavailable("m"), bad_request("m")):
        assert "x-should-retry" not in error.response().headers


def test_our_own_bug_tells_the_request_id_and_nothing_else() -> None:
    assert internal_error("abc").body()["error"]["message"] == (
        "internal error; the log has it under the request id abc"
    )


# From the engine


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_answer_is_no_error(reason: FinishReason) -> None:
    assert failure(finished(reason)) is None


def test_a_deadline_is_504_with_the_numbers() -> None:
    error = failure(finished(FinishReason.TIMEOUT))
    assert error is not None
    assert (error.status, error.code, error.param) == (504, "deadline_exceeded", "timeout")
    assert "after 2.5 s" in error.message
    assert "11 tokens" in error.message


def test_an_abort_that_the_client_did_not_ask_for_is_503() -> None:
    error = failure(finished(FinishReason.ABORT))
    assert error is not None
    assert (error.status, error.retry_after) == (503, 1)


def test_the_engines_reason_is_for_the_log_alone() -> None:
    error = failure(finished(FinishReason.ERROR, error="secret/path: boom"))
    assert error is not None
    assert error.status == 500
    assert "secret" not in json.dumps(error.body())


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
