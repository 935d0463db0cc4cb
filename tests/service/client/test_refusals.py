"""Refusals of a real server and their exceptions; retries after a full queue."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from logitd import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    DeadlineExceededError,
    NotFoundError,
    QueueFullError,
    ServerError,
    StreamError,
)
from logitd.service.client.transport import Exchange
from tests.service.client.conftest import Connect
from tests.service.serving import TEST_TIMEOUT, Serving, eventually, request_bytes, serving
from tests.service.spelling import long_prompt

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
    with connect(speller.url).stream(**LONG, timeout=1.0) as stream:
        error = refused(DeadlineExceededError, lambda: list(stream))
        assert (error.status, error.param) == (504, "timeout")
        assert stream.text.startswith("bcd")
        assert list(stream) == []
        with pytest.raises(StreamError, match="result is incomplete"):
            stream.result()


def test_faults_of_the_server_have_their_id_in_the_log(
    server: Serving, connect: Connect, monkeypatch: pytest.MonkeyPatch, logged_errors: list[str]
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("logitd.service.models.served.Models.find", broken)
    error = refused(ServerError, lambda: connect(server.url).probs("a"))
    assert (error.status, error.code) == (500, "internal")
    assert error.message.endswith(f"request id {error.request_id}")
    assert str(error.request_id) in logged_errors[0]
    logged_errors.clear()


# A full queue


def occupy(server: Serving, stack: ExitStack) -> Callable[[], None]:
    """Hold the slot with a reply that is not read, until the returned function is called."""
    raw = stack.enter_context(server.connect(receive_buffer=4096))
    raw.sendall(request_bytes("/logits", {"prompt": long_prompt(8000), "positions": "all"}))
    eventually(lambda: server.sample("logitd_kv_slots_used") == 1)
    return raw.close


def test_full_queues_refuse_and_clients_retry(spelling_path: Path, connect: Connect) -> None:
    with serving(spelling_path, slots=1, max_queue=0, slow_reader_timeout=TEST_TIMEOUT) as server:

        def answered(status: int) -> float:
            return server.sample(
                "logitd_http_requests_total", endpoint="/generate", status=str(status)
            )

        with ExitStack() as stack:
            occupy(server, stack)
            client = connect(server.url, max_retries=0)
            error = refused(QueueFullError, lambda: client.generate("a"))
            assert (error.status, error.code) == (429, "queue_full")
            assert error.retry_after is not None
            assert error.retry_after >= 1
            with pytest.raises(QueueFullError), client.stream("a"):
                pass
            assert answered(429) == 2
            retrying = connect(server.url, max_retries=1)
            refused(QueueFullError, lambda: retrying.generate("a"))
            assert answered(429) == 4


def test_queues_that_empty_answer_the_next_try(
    spelling_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot becomes free after the first refusal."""
    with (
        serving(spelling_path, slots=1, max_queue=0, slow_reader_timeout=TEST_TIMEOUT) as server,
        ExitStack() as stack,
    ):
        leave = occupy(server, stack)
        waits: list[float] = []
        decide = Exchange.wait_after_refusal

        def let_go(*args: Any) -> float:
            waits.append(decide(*args))
            leave()
            server.wait_idle()
            return waits[-1]

        monkeypatch.setattr("logitd.service.client.transport.Exchange.wait_after_refusal", let_go)
        client = connect(server.url)
        assert client.generate("a", max_tokens=3).text == "bcd"
        assert len(waits) == 1
        assert waits[0] >= 1
        ok = server.sample("logitd_http_requests_total", endpoint="/generate", status="200")
        assert ok == 1
