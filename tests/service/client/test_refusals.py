"""Requests that a real server refuses, and the exceptions that the clients raise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logitd import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    DeadlineExceededError,
    NotFoundError,
    StreamError,
)
from tests.service.client.conftest import Connect
from tests.service.serving import Serving, serving

KEY = "0123456789abcdef"
LONG: dict[str, Any] = {"prompt": "a", "ignore_eos": True}
"""A generation that outlasts any test."""


def refused(kind: type[APIStatusError], call: Callable[[], Any]) -> APIStatusError:
    """The error of a call, which must be exactly of this class and have the id of its request."""
    with pytest.raises(APIStatusError) as caught:
        call()
    error = caught.value
    assert type(error) is kind
    assert error.request_id
    assert str(error) == f"{error.message} (request {error.request_id})"
    return error


def test_wrong_fields_are_bad_requests(server: Serving, connect: Connect) -> None:
    client = connect(server.url)
    error = refused(
        BadRequestError,
        lambda: client.generate("x", temprature=0),  # type: ignore[call-arg]
    )
    assert (error.status, error.type, error.param, error.code) == (
        400, "invalid_request_error", "temprature", None,
    )  # fmt: skip
    assert error.message == "unknown field 'temprature'; did you mean 'temperature'?"
    assert error.retry_after is None
    assert refused(BadRequestError, lambda: client.logits("x", top_k=1000)).param == "top_k"
    assert refused(BadRequestError, lambda: client.logits([])).param == "prompt"
    error = refused(BadRequestError, lambda: client.stream("x" * 100, max_tokens=29).result())
    assert error.code == "context_length_exceeded"


def test_wrong_keys_are_authentication_errors(checkpoint_path: Path, connect: Connect) -> None:
    with serving(checkpoint_path, api_keys=f"ci={KEY}") as server:
        assert connect(server.url, api_key=KEY).info().api_keys
        for key in (None, "another-key"):
            client = connect(server.url, api_key=key)
            error = refused(AuthenticationError, client.info)
            assert (error.status, error.type) == (401, "authentication_error")
            refused(AuthenticationError, lambda: connect(server.url).stream("a").result())
            assert client.health().ok


def test_other_models_and_paths_are_not_found(server: Serving, connect: Connect) -> None:
    error = refused(NotFoundError, lambda: connect(server.url).generate("x", model="gpt-9"))
    assert (error.status, error.code) == (404, "model_not_found")
    gone = connect(server.url, model="gpt-9")
    refused(NotFoundError, lambda: gone.generate("x", model=None))  # it chooses no model
    error = refused(NotFoundError, lambda: connect(f"{server.url}/elsewhere/").info())
    assert "/elsewhere/info" in error.message


def test_deadline_within_a_stream_keeps_its_text(speller: Serving, connect: Connect) -> None:
    with connect(speller.url).stream(**LONG, timeout=0.5) as stream:
        error = refused(DeadlineExceededError, lambda: list(stream))
        assert (error.status, error.param) == (504, "timeout")
        assert stream.text.startswith("bcd")
        assert list(stream) == []
        with pytest.raises(StreamError, match="result is incomplete"):
            stream.result()
