"""What happens to every request: its id, its line in the log, the cap on headers, our own bugs."""

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.responses import StreamingResponse

from service.app import create_app
from service.middleware import MAX_HEADER_BYTES
from service.schemas import ErrorReply
from tests.service.serving import Serving, eventually, read_all, serve_settings, serving_app


@pytest.fixture(scope="module")
def buggy(checkpoint_path: Path) -> Iterator[Serving]:
    """The service with two endpoints that have a bug."""
    app = create_app(serve_settings(checkpoint_path))

    @app.get("/bug")
    def bug() -> None:
        raise ZeroDivisionError("/secret/path of our own")

    @app.get("/late-bug")
    def late_bug() -> StreamingResponse:
        def body() -> Iterator[bytes]:
            yield b"one"
            raise ZeroDivisionError("/secret/path of our own")

        return StreamingResponse(body())

    with serving_app(app) as running:
        yield running


# Ids


@pytest.mark.parametrize("sent", ["abc", "A-1_2.3:4", "x" * 128])
def test_a_request_id_is_taken_and_returned(server: Serving, sent: str) -> None:
    response = server.client.get("/version", headers={"X-Request-ID": sent})
    assert response.headers.get_list("x-request-id") == [sent]


@pytest.mark.parametrize("sent", [None, "", "x" * 129, "a b", "é", 'a"', "a,b"])
def test_another_one_is_replaced(server: Serving, sent: str | None) -> None:
    headers = [] if sent is None else [(b"X-Request-ID", sent.encode())]
    ids = {server.client.get("/version", headers=headers).headers["x-request-id"] for _ in "ab"}
    assert len(ids) == 2
    assert all(len(one) == 32 and one.isalnum() for one in ids)


@pytest.mark.parametrize("path", ["/generate", "/nothing", "/logits", "/docs/assets/nothing"])
def test_refusals_have_an_id_too(server: Serving, path: str) -> None:
    response = server.client.get(path, headers={"X-Request-ID": "abc"})
    assert response.status_code in (404, 405)
    assert response.headers["x-request-id"] == "abc"


# Headers


@pytest.mark.parametrize(
    "headers",
    [{"X-Long": "a" * MAX_HEADER_BYTES}, {f"X-{i}": "a" * 60 for i in range(2000)}],
    ids=["one", "many"],
)
def test_headers_are_capped(server: Serving, headers: dict[str, str]) -> None:
    response = server.client.get("/version", headers=headers)
    assert response.status_code == 431
    assert str(MAX_HEADER_BYTES) in ErrorReply.model_validate(response.json()).error.message
    assert server.client.get("/version", headers={"X-Long": "a" * 60_000}).status_code == 200


# Our own bugs


def test_our_own_bug_is_500_with_the_request_id_alone(
    buggy: Serving, logged_errors: list[str]
) -> None:
    response = buggy.client.get("/bug", headers={"X-Request-ID": "abc"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "abc"
    error = ErrorReply.model_validate(response.json()).error
    assert (error.type, error.code) == ("server_error", "internal")
    assert error.message == "internal error; the log has it under the request id abc"
    assert len(logged_errors) == 1
    assert "our own bug, request abc" in logged_errors[0]
    assert "/secret/path of our own" in logged_errors[0]
    logged_errors.clear()
    assert buggy.sample("logitd_http_requests_total", endpoint="other", status="500") == 1


def test_a_bug_after_the_first_byte_breaks_the_reply_off(
    buggy: Serving, logged_errors: list[str]
) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
        buggy.client.get("/late-bug")
    eventually(lambda: len(logged_errors) > 0)
    assert "/secret/path of our own" in logged_errors[0]
    logged_errors.clear()


def test_the_service_goes_on_after_it(buggy: Serving, logged_errors: list[str]) -> None:
    buggy.client.get("/bug")
    logged_errors.clear()
    assert buggy.client.get("/version").status_code == 200


# The log


def test_a_request_is_one_line_without_anything_that_it_said(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    secret = "canary-in-a-coal-mine"
    server.client.post(
        f"/generate?key={secret}",
        json={"prompt": secret, "max_tokens": 1, "stop": secret},
        headers={"Authorization": secret, "User-Agent": secret, "X-Request-ID": "abc"},
    )
    server.client.get(f"/{secret}", headers={"X-Request-ID": "abd"})
    assert secret not in caplog.text
    assert secret not in server.client.get("/metrics").text
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("POST /generate 200 ")
    assert first.endswith(" ms abc")
    assert second.startswith("GET other 404 ")


@pytest.mark.parametrize(
    ("user", "logged"),
    [
        ("alice", " user=alice"),
        ("Ann of Québec, 2", " user=Ann of Québec, 2"),
        (
            "a\nPOST /generate 200\r\x1b[31m\x00\u2028\u202eb",
            " user=a?POST /generate 200??[31m???b",
        ),
        ("x" * 500, f" user={'x' * 64}..."),
        ("", ""),
        (None, ""),
    ],
    ids=["a name", "some words", "control characters", "long", "empty", "null"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_user_of_an_openai_request_is_in_its_line(
    chatter: Serving,
    caplog: pytest.LogCaptureFixture,
    path: str,
    user: str | None,
    logged: str,
) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    prompt = {"prompt": "a"} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": "a"}]
    }  # fmt: skip
    for more in ({}, {"n": 65}):
        body = {**prompt, "user": user, "max_tokens": 1, **more}
        chatter.post(path, body, **{"X-Request-ID": "abc"})
    eventually(lambda: len(caplog.records) == 2)
    done, refused = (record.getMessage() for record in caplog.records)
    assert done.startswith(f"POST {path} 200 ")
    assert refused.startswith(f"POST {path} 400 ")
    for line in (done, refused):
        assert line.endswith(f" ms abc{logged}")
        assert line.isprintable()


def test_what_is_polled_is_not_logged(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    for path in ("/health", "/health/live", "/metrics"):
        assert server.client.get(path).status_code == 200
    assert caplog.records == []


def test_what_is_no_http_gets_an_answer_and_the_service_goes_on(server: Serving) -> None:
    for nonsense in (b"garbage\r\n\r\n", b"\x00\xff\r\n\r\n", b"GET /\r\r\n\n HTTP/1.1\r\n\r\n"):
        with server.connect() as raw:
            raw.sendall(nonsense)
            assert read_all(raw).startswith(b"HTTP/1.1 400 ")
    assert server.client.get("/version").status_code == 200
