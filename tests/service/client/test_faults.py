"""Faults between client and server: temporary refusals, broken connections, silence, proxies."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from logitd import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncClient,
    AuthenticationError,
    Client,
    DeadlineExceededError,
    LogitdError,
    MalformedReplyError,
    StreamError,
)
from logitd.service.client import transport
from tests.service.client.conftest import Connect
from tests.service.client.scripted import Script, events, refusal, reply, scripted
from tests.service.client.test_streaming import CHUNKS, TAIL, chunk
from tests.service.serving import TEST_TIMEOUT

KEY = "sk-0123456789abcdef"
VERSION = reply(200, {"version": "9"})
STREAM = events(*CHUNKS, chunk(**TAIL))
SOON = 0.3
"""A timeout in seconds, short enough for a test to wait until it has passed."""

SENT: dict[str, Callable[[Client], Any]] = {
    "generate": lambda client: client.generate("a"),
    "stream": lambda client: list(client.stream("a")),
    "logits": lambda client: client.logits("a"),
    "version": lambda client: client.version(),
}


# Retries


@pytest.mark.parametrize(
    "first",
    [
        refusal(429, "Retry-After: 0"),
        refusal(502),
        refusal(503, "Retry-After: 0"),
        Script(refusal(503, "Retry-After: 0", "Connection: close"), "close"),
        Script(b"", "close"),
        Script(reply(503, b"{", length=999), "close"),
    ],
    ids=["429", "502", "503", "503 and closed", "closed", "503 and broken off"],
)
def test_temporary_faults_are_tried_again(
    connect: Connect, first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "FIRST_WAIT_SECONDS", 0.01)
    with scripted(first, first, VERSION) as server:
        assert connect(server.url).version() == "9"
        ids = [server.header("X-Request-ID", request) for request in range(3)]
        assert len(set(ids)) == 1
        assert len(server.requests) == 3
    with scripted(first, first, VERSION) as server:
        with pytest.raises(LogitdError):
            connect(server.url, max_retries=1).version()
        assert len(server.requests) == 2
    with scripted(first, STREAM) as server:
        assert connect(server.url).stream("a").result().text == "a\u2028b"
        assert server.body(1) == {"prompt": "a", "stream": True}


def test_calls_have_ids_and_share_a_connection(connect: Connect) -> None:
    with scripted(VERSION, VERSION) as server:
        client = connect(server.url)
        client.version()
        client.version()
        assert server.header("X-Request-ID", 0) != server.header("X-Request-ID", 1)
        assert server.connections == 1


def test_waits_are_as_long_as_the_server_asks(connect: Connect) -> None:
    with scripted(refusal(429, "Retry-After: 1"), VERSION) as server:
        started = time.monotonic()
        connect(server.url).version()
        assert time.monotonic() - started >= 1


def test_missing_servers_are_connection_errors(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(APIConnectionError, match=f"no connection to {url}.*Is the server running"):
        connect(url, max_retries=1).version()


@pytest.mark.parametrize("name", SENT)
@pytest.mark.parametrize("status", [404, 504])
def test_permanent_refusals_are_not_tried_again(connect: Connect, name: str, status: int) -> None:
    with scripted(refusal(status, "Retry-After: 0"), VERSION) as server:
        with pytest.raises(APIStatusError) as caught:
            SENT[name](connect(server.url))
        assert caught.value.status == status
        assert len(server.requests) == 1


@pytest.mark.parametrize("name", SENT)
def test_replies_that_have_begun_are_not_tried_again(connect: Connect, name: str) -> None:
    begun = reply(200, b'{"ver', length=999)
    with scripted(Script(begun, "close"), VERSION) as server:
        with pytest.raises((APIConnectionError, StreamError), match="broke off after") as caught:
            SENT[name](connect(server.url))
        assert len(server.requests) == 1
        error = caught.value
        assert isinstance(error, StreamError) == (name == "stream")
        assert error.request_id == server.header("X-Request-ID")


@pytest.mark.parametrize(
    ("stream", "how"),
    [
        (events(*CHUNKS[:2], end=False, whole=False), "broke off"),
        (events(*CHUNKS[:2], end=False), "ended without its last event,"),
        (events(*CHUNKS[:2], end=False, whole=False) + b"5\r\ndata:", "broke off"),
        (events(*CHUNKS[:2], end=False, whole=False) + b"no chunk", "broke off"),
    ],
    ids=["cut", "ended", "cut within a chunk", "nonsense"],
)
def test_streams_that_are_cut_count_their_tokens(connect: Connect, stream: bytes, how: str) -> None:
    with scripted(Script(stream, "close"), STREAM) as server:
        with connect(server.url).stream("a") as cut:
            chunks = iter(cut)
            assert [next(chunks).text, next(chunks).text] == ["a\u2028", ""]
            with pytest.raises(StreamError, match=f"the stream {how}.* after 3 tokens") as caught:
                next(chunks)
            assert caught.value.tokens == 3
            assert cut.text == "a\u2028"
            assert list(chunks) == []
            with pytest.raises(StreamError, match="result is incomplete"):
                cut.result()
        assert len(server.requests) == 1


def test_error_events_end_a_stream(connect: Connect) -> None:
    error = {"message": "late", "type": "timeout_error", "param": None, "code": "c"}
    with scripted(Script(events(CHUNKS[0], {"error": error}, chunk()), "hold")) as server:
        with connect(server.url).stream("a") as stream:
            with pytest.raises(DeadlineExceededError, match="late") as caught:
                list(stream)
            assert stream.text == "a\u2028"
            assert server.left.wait(TEST_TIMEOUT)
        assert (caught.value.status, caught.value.code) == (504, "c")
        assert caught.value.request_id == server.header("X-Request-ID") == stream.request_id


def test_unreadable_events_end_a_stream(connect: Connect) -> None:
    with scripted(Script(events({"a": 1}, end=False, whole=False), "hold")) as server:
        with pytest.raises(MalformedReplyError, match="id is missing"):
            list(connect(server.url).stream("a"))
        assert server.left.wait(TEST_TIMEOUT)


# Silence


@pytest.mark.parametrize("name", SENT)
def test_silence_before_a_reply_is_a_timeout(connect: Connect, name: str) -> None:
    with scripted(Script(b"", "hold"), VERSION) as server:
        with pytest.raises(APITimeoutError, match=f"did not answer within {SOON} s"):
            SENT[name](connect(server.url, timeout=SOON))
        assert server.left.wait(TEST_TIMEOUT)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("name", "begun", "received"),
    [("logits", reply(200, b"x" * 77, length=999), "77 bytes"),
     ("stream", events(*CHUNKS[:2], end=False, whole=False), "3 tokens")],
)  # fmt: skip
def test_silence_within_a_reply_is_a_timeout(
    connect: Connect, name: str, begun: bytes, received: str
) -> None:
    with scripted(Script(begun, "hold")) as server:
        with pytest.raises(APITimeoutError, match=f"stalled for {SOON} s after {received}"):
            SENT[name](connect(server.url, timeout=SOON))
        assert server.left.wait(TEST_TIMEOUT)


def test_calls_without_a_free_connection_time_out() -> None:
    with scripted(Script(b"", "hold")) as server:

        async def main() -> None:
            limits = httpx.Limits(max_connections=1)
            async with httpx.AsyncClient(trust_env=False, limits=limits) as http:
                client = AsyncClient(server.url, http=http, timeout=TEST_TIMEOUT)
                hasty = AsyncClient(server.url, http=http, timeout=SOON)
                task = asyncio.create_task(client.version())
                while not server.requests:
                    await asyncio.sleep(0.002)
                with pytest.raises(APITimeoutError, match="too many calls at once"):
                    await hasty.version()
                task.cancel()

        asyncio.run(main())


# Connections


def test_connections_are_used_again(connect: Connect) -> None:
    with scripted(STREAM, VERSION, refusal(400), STREAM, VERSION) as server:
        client = connect(server.url)
        client.stream("a").result()
        client.version()
        with pytest.raises(LogitdError):
            client.version()
        with client.stream("a") as stream:
            list(stream)
        client.version()
        assert server.connections == 1


def test_bytes_after_the_end_of_a_stream_are_ignored(connect: Connect) -> None:
    for more in (b"", b"5\r\n: xyz", b"nonsense", b"5\r\n: xyz\r\n5\r\n"):
        whole = events(*CHUNKS, chunk(**TAIL), whole=False) + more
        with scripted(Script(whole, "close")) as server:
            assert connect(server.url).stream("a").result().usage.completion_tokens == 3


def test_large_refusals_are_read_in_part(connect: Connect) -> None:
    begun = reply(500, b"x" * 10**6, length=10**12)
    with scripted(Script(begun, "hold")) as server:
        with pytest.raises(
            APIStatusError, match="500 Internal Server Error, and the reply is not logitd's"
        ):
            connect(server.url).version()
        assert server.left.wait(TEST_TIMEOUT)


# Proxies


def test_pages_of_a_proxy_are_named(connect: Connect) -> None:
    page = b"<html><title>403 Forbidden</title><body><h1>Go away</h1></body></html>"
    html = "Content-Type: text/html"
    moved = reply(302, b"", "Location: /x")
    with scripted(reply(403, page, html), reply(200, page, html), moved) as server:
        client = connect(server.url)
        with pytest.raises(
            APIStatusError, match="403 Forbidden, and the reply is not logitd's"
        ) as caught:
            client.generate("a")
        assert (caught.value.status, caught.value.type) == (403, None)
        with pytest.raises(MalformedReplyError, match=r"/generate: .* text/html and is not JSON"):
            client.generate("a")
        with pytest.raises(APIStatusError, match="302 Found"):
            client.generate("a")


def test_error_names_the_id_of_a_proxy(connect: Connect) -> None:
    theirs, new = refusal(502, "X-Request-ID: theirs"), refusal(400, "X-Request-ID: new")
    with scripted(theirs, new) as server:
        with pytest.raises(APIStatusError, match=r"no, says 400 \(request new\)"):
            connect(server.url).version()
        assert server.header("X-Request-ID", 0) == server.header("X-Request-ID", 1) != "theirs"


def test_key_is_sent_and_appears_in_no_text(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = refusal(401, type="authentication_error", code="invalid_api_key")
    echo = reply(403, f"<pre>Authorization: Bearer {KEY}</pre>".encode())
    with scripted(VERSION, wrong, echo, Script(b"", "close"), Script(b"", "close")) as server:
        client = connect(server.url, api_key=KEY, max_retries=1)
        assert client.version() == "9"
        assert server.header("Authorization") == f"Bearer {KEY}"
        errors: list[Exception] = []
        for kind in (AuthenticationError, APIStatusError, APIConnectionError):
            with pytest.raises(kind) as caught:
                client.stream("a").result()
            errors.append(caught.value)
        shown = [repr(client), str(client), *map(repr, errors), *map(str, errors), caplog.text]
        assert all("0123456789" not in one for one in shown)
        assert caplog.text
        assert "[API key]" in str(errors[1])
