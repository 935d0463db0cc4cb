"""Middleware: request ids, log lines, headers that are too large, exceptions in endpoints, and
pages of other origins."""

import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from logitd.service.application.middleware import EXPOSED_HEADERS
from logitd.service.connections.reading import MAX_HEADER_BYTES
from logitd.service.http.schemas import ErrorReply
from logitd.service.log import JsonFormatter
from tests.service.serving import (
    Serving,
    app_with_bugs,
    eventually,
    request_bytes,
    serving,
    serving_app,
)

LONG = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def buggy(checkpoint_path: Path) -> Iterator[Serving]:
    with serving_app(app_with_bugs(checkpoint_path)) as running:
        yield running


# Ids


@pytest.mark.parametrize("sent", ["abc", "A-1_2.3:4", "x" * 128])
@pytest.mark.parametrize("path", ["/version", "/generate", "/nothing", "/docs/assets/nothing"])
def test_request_id_is_returned(server: Serving, path: str, sent: str) -> None:
    response = server.client.get(path, headers={"X-Request-ID": sent})
    assert response.headers.get_list("x-request-id") == [sent]


@pytest.mark.parametrize("sent", [None, "", "x" * 129, "a b", "é", 'a"', "a,b"])
def test_invalid_request_id_is_replaced(server: Serving, sent: str | None) -> None:
    headers = [] if sent is None else [(b"X-Request-ID", sent.encode())]
    ids = {server.client.get("/version", headers=headers).headers["x-request-id"] for _ in "ab"}
    assert len(ids) == 2
    assert all(len(one) == 32 and one.isalnum() for one in ids)


# Bugs


def test_bug_is_500_with_the_request_id(buggy: Serving, logged_errors: list[str]) -> None:
    response = buggy.client.get("/bug", headers={"X-Request-ID": "abc"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "abc"
    error = ErrorReply.model_validate(response.json()).error
    assert (error.type, error.code) == ("server_error", "internal")
    assert error.message == "internal error; the log has it under the request id abc"
    assert len(logged_errors) == 1
    assert "internal error, request abc" in logged_errors[0]
    assert "/secret/path of our own" in logged_errors[0]
    logged_errors.clear()
    assert buggy.sample("logitd_http_requests_total", endpoint="other", status="500") == 1


def test_bug_after_the_first_byte_ends_the_reply(buggy: Serving, logged_errors: list[str]) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
        buggy.client.get("/late-bug")
    eventually(lambda: len(logged_errors) > 0)
    assert "/secret/path of our own" in logged_errors[0]
    assert "internal error" not in logged_errors[0], "there is no second reply"
    logged_errors.clear()
    assert buggy.client.get("/version").status_code == 200


# The log


def test_log_line_has_no_content_of_the_request(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    secret = "canary-in-a-coal-mine"
    server.client.post(
        "/generate",
        json={"prompt": secret, "max_tokens": 1, "stop": secret},
        headers={"Authorization": secret, "User-Agent": secret, "X-Request-ID": "abc"},
    )
    server.client.get(f"/{secret}?{secret}={secret}", headers={"X-Request-ID": "abd"})
    server.client.get(f"/version?{secret}={secret}", headers={"X-Request-ID": "abe"})
    assert secret not in caplog.text
    assert secret not in server.client.get("/metrics").text
    first, second, third = (record.getMessage() for record in caplog.records)
    assert third.startswith("GET /version 200 ")
    assert first.startswith("POST /generate 200 ")
    numbers = (
        " prompt_tokens=21 cached_tokens=0 completion_tokens=1 queue_ms= prefill_ms= decode_ms="
    )
    assert re.sub(r"(ms=)[\d.]+", r"\1", first).endswith(f" ms abc{numbers}")
    assert second.startswith("GET other 404 ")
    assert second.endswith(" ms abd")


def test_polls_and_the_files_of_a_page_are_not_logged(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    for path in ("/static/playground/main.js", "/health", "/health/live", "/info", "/metrics"):
        assert server.client.get(path).status_code == 200
    server.client.get("/version")
    assert [record.getMessage().split()[1] for record in caplog.records] == ["/version"]


def test_json_line_has_each_number_by_name(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """The log line has the same numbers of tokens and the same times as the reply."""
    caplog.set_level(logging.INFO, "logitd.http")
    body = {"prompt": "abc", "n": 2, "max_tokens": 3, "ignore_eos": True}
    reply = server.generate(**body)
    path = "/sweep"
    change = {"stage": "blocks.*.attention.heads", "operation": "zero"}
    server.json(path, {"prompt": "abc", "vary": change, "over": ["layers"], "token_id": 97})
    eventually(lambda: len(caplog.records) == 2)
    generated, swept = (json.loads(JsonFormatter().format(record)) for record in caplog.records)
    assert (generated["level"], generated["logger"]) == ("info", "logitd.http")
    assert (generated["method"], generated["endpoint"]) == ("POST", "/generate")
    assert generated["status"] == 200
    usage, spent = reply["usage"], reply["timings"]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert generated[name] == usage[name], name
    for name in ("queue_ms", "prefill_ms", "decode_ms"):
        assert generated[name] == pytest.approx(spent[name], abs=0.06), name
    assert generated["duration_ms"] >= generated["queue_ms"] + generated["decode_ms"] - 0.2
    assert datetime.fromisoformat(generated["time"]).utcoffset() == timedelta(0)
    layers = server.served.checkpoint.config.n_layer
    assert swept["prompt_tokens"] == 3 * (1 + layers), "each cell repeats the prompt"


def test_log_line_names_the_limit(checkpoint_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    with serving(checkpoint_path, slots=1, max_queue=1, max_reply_elements=2**16) as server:
        assert server.post("/v1/completions", {"prompt": ["a"] * 3, "n": 1}).status_code == 400
        with server.connect() as raw:
            raw.sendall(request_bytes("/generate", LONG))
            eventually(lambda: server.served.engine.admission.sequences == 1)
            response = server.post("/v1/completions", {"prompt": ["a"] * 2})
            assert response.status_code == 429
        limits = ("queue_sequences", "queue_tokens", "queue_elements", "reply_elements")
        found = {
            limit: server.sample("logitd_requests_rejected_total", limit=limit) for limit in limits
        }
        assert found == {limit: float(limit == "queue_sequences") for limit in limits}
    refused = next(record for record in caplog.records if " 429 " in record.getMessage())
    assert " limit=queue_sequences" in refused.getMessage()


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
def test_log_line_has_the_user(
    chatter: Serving, caplog: pytest.LogCaptureFixture, path: str, user: str | None, logged: str
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
        assert " ms abc" in line
        assert line.endswith(logged)
        assert ("user=" in line) == bool(logged)
        assert line.isprintable()


def test_polled_endpoints_are_not_logged(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    for path in ("/health", "/health/live", "/info", "/metrics"):
        assert server.client.get(path).status_code == 200
    assert caplog.records == []


# Pages from other origins

PAGE = "https://page.example"
KEY = {"Authorization": "Bearer a-key-of-the-page"}


@pytest.fixture(scope="module")
def open_to_page(checkpoint_path: Path) -> Iterator[Serving]:
    """A server that requires API keys and that web pages of two origins may use."""
    origins = f"{PAGE},http://localhost:3000"
    keys = "page=a-key-of-the-page"
    app = app_with_bugs(checkpoint_path, cors_origins=origins, api_keys=keys)
    with serving_app(app) as running:
        eventually(lambda: bool(running.state.models.served))
        yield running


def preflight(server: Serving, path: str, *, origin: str = PAGE, **headers: str) -> httpx.Response:
    """The request that a browser sends before a request with a JSON body or a key."""
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return server.client.options(path, headers=asked | headers)


def readable(response: httpx.Response, origin: str = PAGE) -> None:
    """Assert that the page may read the reply and its useful headers."""
    assert response.headers.get_list("access-control-allow-origin") == [origin]
    exposed = response.headers["access-control-expose-headers"].lower().split(", ")
    assert {"x-request-id", "retry-after", "server-timing"} <= set(exposed)
    for name in response.headers:
        assert not name.startswith("x-logitd") or name in exposed
    assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize("path", ["/generate", "/tokenize", "/metrics", "/nothing"])
def test_preflight_needs_no_key(open_to_page: Serving, path: str) -> None:
    for origin in (PAGE, "http://localhost:3000"):
        response = preflight(open_to_page, path, origin=origin)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert "POST" in response.headers["access-control-allow-methods"]
        allowed = response.headers["access-control-allow-headers"]
        assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed.split(","))


@pytest.mark.parametrize(
    "origin", ["https://other.example", "http://page.example", f"{PAGE}:8443", "null", "", "*"]
)
def test_other_origins_are_refused(open_to_page: Serving, origin: str) -> None:
    assert preflight(open_to_page, "/generate", origin=origin).status_code == 400
    response = open_to_page.client.get("/version", headers={"Origin": origin})
    for one in (response, preflight(open_to_page, "/generate", origin=origin)):
        assert "access-control-allow-origin" not in one.headers


def test_incomplete_preflight_needs_a_key(open_to_page: Serving) -> None:
    for headers in ({}, {"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}):
        assert open_to_page.client.options("/generate", headers=headers).status_code == 401


def test_preflight_is_logged_and_counted(
    open_to_page: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    response = preflight(open_to_page, "/probs", **{"X-Request-ID": "abc"})
    assert response.headers.get_list("x-request-id") == ["abc"]
    counted = {"endpoint": "/probs", "status": "200"}
    eventually(lambda: open_to_page.sample("logitd_http_requests_total", **counted) == 1)
    eventually(lambda: len(caplog.records) == 1)  # the log line is written after the reply
    (record,) = caplog.records
    assert record.getMessage().startswith("OPTIONS /probs 200 ")
    assert record.getMessage().endswith(" ms abc")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/generate", {"prompt": "a", "max_tokens": 1}, 200), ("/generate", {"prompt": ""}, 400),
     ("/generate", {"prompt": "a", "model": "b"}, 404), ("/generate", b"x" * 5_000_000, 413),
     ("/tokenize", {"prompt": "a"}, 200), ("/logits", {"prompt": "a"}, 200), ("/info", {}, 405),
     ("/nothing", {}, 404), ("/generate", {"prompt": "a"}, 401),
     ("/generate", {"prompt": "a", "max_tokens": 3, "stream": True}, 200)],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_page_can_read_replies_and_errors(
    open_to_page: Serving, path: str, body: Any, status: int
) -> None:
    key = {} if status == 401 else KEY
    response = open_to_page.post(path, body, Origin=PAGE, **key)
    assert response.status_code == status
    readable(response)
    assert response.headers["x-request-id"]


def test_page_can_read_a_bug(open_to_page: Serving, logged_errors: list[str]) -> None:
    response = open_to_page.client.get("/bug", headers={"Origin": PAGE, **KEY})
    assert response.status_code == 500
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    readable(response)
    logged_errors.clear()


def test_page_can_read_that_the_queue_is_full(spelling_path: Path) -> None:
    with (
        serving(spelling_path, slots=1, max_queue=0, cors_origins="*") as server,
        server.connect() as running,
    ):
        running.sendall(request_bytes("/generate", {"prompt": "a", "ignore_eos": True}))
        eventually(lambda: server.sample("logitd_kv_slots_used") == 1)
        response = server.post("/generate", {"prompt": "a"}, Origin=PAGE)
        assert response.status_code == 429
        assert response.headers["retry-after"]
        readable(response, origin="*")


def test_page_can_read_the_weights_of_an_array(open_to_page: Serving) -> None:
    response = open_to_page.post(
        "/logits", {"prompt": "a"}, Origin=PAGE, Accept="application/x-npy", **KEY
    )
    assert {name for name in response.headers if name.startswith("x-logitd")} == {
        name.lower() for name in EXPOSED_HEADERS if name.startswith("X-Logitd")
    }
    readable(response)


def test_without_the_setting_no_page_may_read(server: Serving) -> None:
    assert preflight(server, "/generate").status_code == 405
    for response in (
        preflight(server, "/generate"),
        server.client.get("/version", headers={"Origin": PAGE}),
        server.post("/generate", {"prompt": ""}, Origin=PAGE),
    ):
        assert not any(name.startswith("access-control") for name in response.headers)


def test_large_headers_of_a_preflight_are_refused(open_to_page: Serving) -> None:
    asked = "x" * MAX_HEADER_BYTES
    response = preflight(open_to_page, "/generate", **{"Access-Control-Request-Headers": asked})
    assert response.status_code == 431
    assert response.headers["x-request-id"]
