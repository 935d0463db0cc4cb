"""Errors of the client: their classes and messages, and whether they can be copied and pickled."""

import copy
import json
import pickle
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logitd
from logitd import APIStatusError, LogitdError
from logitd.service import client
from logitd.service.client.errors import BY_STATUS, STATUS_OF_TYPE, from_event, from_reply
from logitd.service.errors import ErrorType
from tests.service.client.test_reading import JSON

BODY = {"error": {"message": "no", "type": "t", "param": "p", "code": "c"}}


def reply(status: int, body: Any, **headers: str) -> APIStatusError:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return from_reply(status, {k.replace("_", "-"): v for k, v in headers.items()}, content, "id-1")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, logitd.BadRequestError),
        (401, logitd.AuthenticationError),
        (404, logitd.NotFoundError),
        (413, logitd.RequestTooLargeError),
        (403, logitd.PermissionDeniedError),
        (409, logitd.ConflictError),
        (415, logitd.UnsupportedMediaTypeError),
        (429, logitd.QueueFullError),
        (500, logitd.ServerError),
        (503, logitd.UnavailableError),
        (504, logitd.DeadlineExceededError),
        (402, APIStatusError),
        (502, APIStatusError),
        (799, APIStatusError),
    ],
)
def test_statuses_have_their_classes(status: int, kind: type[APIStatusError]) -> None:
    error = reply(status, BODY, retry_after="7")
    assert type(error) is kind
    assert (error.status, error.message, error.type, error.param, error.code) == (
        status, "no", "t", "p", "c",
    )  # fmt: skip
    assert (error.request_id, error.retry_after) == ("id-1", 7)
    assert str(error) == "no (request id-1)"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("0", 0), ("60", 60), ("", None), ("-1", None), ("1.5", None), ("inf", None),
     ("Wed, 21 Oct 2015 07:28:00 GMT", None), ("9" * 400, None)],
)  # fmt: skip
def test_retry_after_is_read_in_seconds(header: str, seconds: float | None) -> None:
    assert reply(429, BODY, retry_after=header).retry_after == seconds


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "502 Bad Gateway, and the reply is not logitd's: an empty body"),
        (
            b"<html><head><title>502 Bad Gateway</title><style>b {}</style></head>\r\n"
            b"<body><h1>502 Bad Gateway</h1><hr>nginx</body></html>",
            "502 Bad Gateway, and the reply is not logitd's: 502 Bad Gateway 502 Bad Gateway nginx",
        ),
        (b"\xff\xfe", "502 Bad Gateway, and the reply is not logitd's: \ufffd\ufffd"),
        (b'{"error": "busy"}', "502 Bad Gateway, and the reply is not logitd's: "
         '{"error": "busy"}'),
        (b'{"error": {"message": 5}}', "502 Bad Gateway, and the reply is not logitd's: "
         '{"error": {"message": 5}}'),
        (b"x" * 10_000, f"502 Bad Gateway, and the reply is not logitd's: {'x' * 200}..."),
    ],
    ids=["nothing", "a page", "no text", "a word", "a number", "long"],
)  # fmt: skip
def test_foreign_bodies_are_quoted(body: bytes, message: str) -> None:
    error = reply(502, body)
    assert error.message == message
    assert (error.type, error.param, error.code) == (None, None, None)


def test_all_types_of_the_service_have_a_status() -> None:
    assert set(STATUS_OF_TYPE) == set(get_args(ErrorType))
    assert set(STATUS_OF_TYPE.values()) < set(BY_STATUS)


@pytest.mark.parametrize("kind", STATUS_OF_TYPE)
def test_events_have_the_class_of_their_type(kind: str) -> None:
    error = from_event({"message": "m", "type": kind, "param": None, "code": "c"}, "id-1")
    assert type(error) is BY_STATUS[STATUS_OF_TYPE[kind]]
    assert (error.status, error.message, error.code) == (STATUS_OF_TYPE[kind], "m", "c")


def test_events_of_unknown_types_are_status_errors() -> None:
    error = from_event({"type": "novel", "message": "m"}, "id-1")
    assert (type(error), error.status, error.message) == (APIStatusError, 200, "m")


@given(JSON, st.integers(100, 999), st.binary())
def test_every_body_or_event_makes_an_error(value: Any, status: int, raw: bytes) -> None:
    for error in (
        reply(status, value),
        reply(status, {"error": value}),
        reply(status, raw),
        reply(status, b"[" * 100_000),
        from_event(value, "id-1"),
    ):
        assert isinstance(error, APIStatusError)
        assert error.message
        assert "id-1" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        reply(429, BODY, retry_after="7"),
        logitd.LogitdError("m", "id-1"),
        logitd.APIConnectionError("m", "id-1"),
        logitd.APITimeoutError("m", "id-1"),
        logitd.StreamError("m", 7, "id-1"),
        logitd.MalformedReplyError("m", "id-1"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled_and_copied(error: LogitdError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert vars(other) == vars(error)
        assert (str(other), other.args) == (str(error), error.args)


def test_all_errors_are_logitd_errors() -> None:
    errors = [getattr(logitd, name) for name in client.NAMES if name.endswith("Error")]
    assert len(errors) >= 15
    assert all(issubclass(error, LogitdError) for error in errors)
