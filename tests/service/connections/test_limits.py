"""Limits on connections: their number, evictions, and log messages."""

import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from logitd.service.application.server import serve
from logitd.service.connections.open_connections import (
    MOST_CONNECTIONS,
    ConnectionLimitError,
    Reports,
    connection_bounds,
)
from logitd.service.metrics.metrics import ConnectionEnd, Metrics
from tests.e2e.server import ServedProcess
from tests.service.serving import (
    Serving,
    client,
    eventually,
    read_until,
    request_bytes,
    serve_settings,
    serving,
)
from tests.service.spelling import long_prompt

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Restore this process's limit on file descriptors after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize(
    ("soft", "expected"), [(256, 112), (1024, 688), (4096, 2992), (20_000, MOST_CONNECTIONS)]
)
def test_descriptors_bound_connections(tmp_path: Path, soft: int, expected: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most, backlog = connection_bounds(serve_settings(tmp_path))
    assert most == expected
    assert most + backlog < soft
    chosen, _ = connection_bounds(serve_settings(tmp_path, max_connections=expected - 1))
    assert chosen == expected - 1


@pytest.mark.usefixtures("descriptors")
def test_more_connections_than_descriptors_allow_are_refused(
    checkpoint_path: Path, logged_errors: list[str]
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    settings = serve_settings(checkpoint_path, max_connections=200)
    with pytest.raises(ConnectionLimitError, match=r"256 file descriptors, .* 112 connections fit"):
        connection_bounds(settings)
    assert serve(settings, announce=lambda served, port: None) == 1
    assert "200 connections" in logged_errors[0]
    logged_errors.clear()


@pytest.fixture
def narrow(spelling_path: Path) -> Iterator[Serving]:
    """A server with a limit of four connections."""
    with serving(spelling_path, slots=8, max_connections=4) as running:
        yield running


def ended(server: Serving, reason: str) -> float:
    return server.sample("logitd_connections_ended_total", reason=reason)


def test_connection_that_waits_longest_makes_room(narrow: Serving) -> None:
    """Connections without a request are closed first, starting with the one that has waited
    longest. Connections that are still sending a body come next. A connection whose reply is in
    progress is never closed."""
    with ExitStack() as stack:

        def connect(begin: bytes) -> socket.socket:
            raw = stack.enter_context(narrow.connect())
            raw.sendall(begin)
            eventually(lambda: narrow.sample("logitd_connections") == min(4, len(opened) + 1))
            opened.append(raw)
            return raw

        opened: list[socket.socket] = []
        answered = connect(request_bytes("/generate", {"prompt": "a", "ignore_eos": True}))
        body = connect(request_bytes("/tokenize", {"prompt": "abc"})[:-5])
        silent = connect(b"")
        used = connect(GET)
        read_until(used, b'"version"')
        first = connect(b"GET /")  # replaces `silent`, which has waited longer than `used`
        assert silent.recv(1) == b""
        second = connect(b"GET /")
        assert used.recv(1) == b""
        for raw in (first, second):
            path = b"version" if raw is first else b"health"
            raw.sendall(path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in read_until(raw, b"}")
        assert ended(narrow, "made_room") == 2
        for raw in (first, second):
            raw.sendall(request_bytes("/generate", {"prompt": "a", "ignore_eos": True}))
        eventually(lambda: narrow.sample("logitd_kv_slots_used") == 3)
        third = connect(b"GET /")
        assert body.recv(1) == b"", "because the others are busy"
        third.sendall(b"version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in read_until(third, b'"version"')
        answered.setblocking(False)
        with pytest.raises(BlockingIOError):
            answered.recv(1)


def test_reader_of_a_reply_does_not_make_room(narrow: Serving) -> None:
    """The server has finished the reply, and its connection has been idle the longest. It is not
    closed, because the client has not read all of the reply."""
    large = {"prompt": long_prompt(500), "max_tokens": 1, "prompt_logprobs": 200}
    with ExitStack() as stack:
        reading = stack.enter_context(narrow.connect(receive_buffer=4096))
        reading.sendall(request_bytes("/generate", large))
        eventually(lambda: narrow.finished("length") == 1)
        reading.recv(1)
        for number in range(6):
            raw = stack.enter_context(narrow.connect())
            raw.sendall(GET)
            read_until(raw, b'"version"')
            assert narrow.sample("logitd_connections") == min(4, number + 2)
        assert ended(narrow, "made_room") == 3
        reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        assert b'"timings"' in read_until(reading, b'"timings"')


def test_full_server_answers_health_only(narrow: Serving) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            raw = stack.enter_context(narrow.connect())
            raw.sendall(request_bytes("/generate", {"prompt": "a", "ignore_eos": True}))
        eventually(lambda: narrow.sample("logitd_kv_slots_used") == 4)
        with client(narrow.url) as http:
            assert http.get("/health").status_code == 200
            refused = http.get("/version")
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            assert "too many connections" in refused.json()["error"]["message"]
        assert ended(narrow, "refused") == 1
        assert ended(narrow, "made_room") <= 1
        held = [stack.enter_context(narrow.connect()) for _ in range(100)]
        with client(narrow.url) as http:
            assert http.get("/health").status_code == 200
        assert narrow.sample("logitd_connections") <= 4 + 17
        for raw in held:
            raw.close()
    eventually(lambda: narrow.sample("logitd_connections") == 0)
    narrow.wait_idle()


def test_connection_above_the_limit_replaces_an_idle_one(narrow: Serving) -> None:
    """The limit is four connections. While all four are busy, a new connection is still accepted.
    The server closes connections once they are idle, and no request gets 503."""
    with ExitStack() as stack:
        tokens = {"prompt": "a", "ignore_eos": True, "max_tokens": 400}
        at_work = [stack.enter_context(narrow.connect()) for _ in range(4)]
        for raw in at_work:
            raw.sendall(request_bytes("/generate", tokens))
        eventually(lambda: narrow.sample("logitd_kv_slots_used") == 4)
        surplus = [stack.enter_context(narrow.connect()) for _ in range(3)]
        eventually(lambda: narrow.sample("logitd_connections") > 4)
        for raw in at_work:
            assert b" 200 " in read_until(raw, b'"timings"')
        narrow.wait_idle()
        surplus[-1].sendall(GET)
        assert b" 200 " in read_until(surplus[-1], b'"version"')
        assert ended(narrow, "refused") == 0
        assert ended(narrow, "made_room") > 0


def test_silent_connections_keep_no_client_out(checkpoint_path: Path) -> None:
    """The process has fewer descriptors than there are connections."""
    with (
        ServedProcess(
            "--checkpoint", str(checkpoint_path), "--threads", "1", descriptors=256
        ) as server,
        ExitStack() as stack,
    ):
        host, _, port = server.address.partition(":")
        for _ in range(400):
            raw = stack.enter_context(socket.socket())
            raw.setblocking(False)
            raw.connect_ex((host, int(port)))
        for _ in range(5):
            with client(server.url) as http:
                assert http.get("/health").status_code == 200
        # Under load the system drops connection attempts and repeats them a second later.
        said = "with 112 connections open; see --max-connections"
        eventually(lambda: said in server.output)


def test_log_reports_ended_connections_at_once_and_then_every_ten_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    metrics = Metrics()
    settings = serve_settings(tmp_path, slow_sender_timeout=1, slow_reader_timeout=2)
    reports = Reports(settings, 7, metrics, clock=lambda: now)
    caplog.set_level(logging.INFO, "logitd.http")
    reports.count(ConnectionEnd.IDLE)
    for _ in range(5):
        reports.count(ConnectionEnd.SILENT)
    reports.count(ConnectionEnd.UNREAD)
    assert caplog.messages == ["ended a connection: no request came within 1 s"]
    now = 9.9
    reports.flush()
    assert len(caplog.messages) == 1
    now = 10.0
    reports.flush()
    assert caplog.messages[1:] == [
        "ended 4 connections: no request came within 1 s",
        "ended a connection: too little of a reply was read within 2 s",
    ]
    assert not reports.pending
    for end in ConnectionEnd:
        number = {ConnectionEnd.SILENT: 5, ConnectionEnd.IDLE: 1, ConnectionEnd.UNREAD: 1}.get(
            end, 0
        )
        name = "logitd_connections_ended_total"
        assert metrics.registry.get_sample_value(name, {"reason": end.value}) == number
