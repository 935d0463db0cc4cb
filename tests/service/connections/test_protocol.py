"""One connection: endless bytes, pipelined requests, deadlines, upgrades, shutdown. Real servers
and sockets."""

import contextlib
import json
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.service.body_writer import MIN_BYTES_PER_SECOND
from logitd.service.connections.reading import (
    MAX_HEADER_BYTES,
    MAX_RAW_HEADER_BYTES,
)
from logitd.service.connections.refusals import head_size
from logitd.service.http.schemas import ErrorReply
from logitd.service.settings.serve import ServeSettings
from tests.e2e.server import ServedProcess
from tests.service.serving import Serving, eventually, read_all, read_until, request_bytes, serving
from tests.service.spelling import END_OF_TEXT_ID

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LARGE: tuple[str, Any] = ("/detokenize", {"tokens": [END_OF_TEXT_ID] * 2**17})
"""Request for a JSON reply that is larger than socket buffers."""
WINDOW = 256 * 1024
"""Number of bytes that a slow reader reads at a time; its receive buffer has the same size."""
TIMEOUT = 0.7
"""The timeouts of `hurried`, in seconds."""
ENDLESS = {
    "header lines": (b"GET / HTTP/1.1\r\n", b"X-A: " + b"b" * 40 + b"\r\n"),
    "a header's value": (b"GET / HTTP/1.1\r\nX-A: ", b"b" * 100),
    "a header's name": (b"GET / HTTP/1.1\r\n", b"b" * 100),
    "an address": (b"GET /", b"b" * 100),
    "blank lines": (b"", b"\r\n" * 50),
    "white space": (b"GET / HTTP/1.1\r\nX-A:", b" " * 100),
    "a chunk's extension": (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n1;a=",
        b"b" * 100,
    ),
    "trailers": (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n",
        b"X-A: " + b"b" * 40 + b"\r\n",
    ),
}


@pytest.fixture(scope="module")
def hurried(spelling_path: Path) -> Iterator[Serving]:
    """A server with short timeouts."""
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(
            spelling_path,
            slots=2,
            slow_sender_timeout=TIMEOUT,
            slow_reader_timeout=TIMEOUT,
            keep_alive_timeout=TIMEOUT,
        ) as running,
    ):
        patch.setattr("logitd.service.connections.protocol.LINGER_SECONDS", 0.5)
        yield running


@pytest.fixture(scope="module")
def large_size(hurried: Serving) -> int:
    size = len(hurried.post(*LARGE).content)
    assert size > 6_000_000, "more than sockets hold"
    return size


def ended(server: Serving, reason: str) -> float:
    return server.sample("logitd_connections_ended_total", reason=reason)


def answers(received: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each response."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        assert length, head
        found.append((int(head.split()[1]), rest[: int(length[1])]))
        received = rest[int(length[1]) :]
    return found


def refused(received: bytes) -> list[int]:
    """Statuses of the responses; checks that the last is an error."""
    *_, (_, body) = whole = answers(received)
    ErrorReply.model_validate_json(body)
    return [status for status, _ in whole]


# Bytes


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_head_is_answered_431(server: Serving, name: str) -> None:
    begin, more = ENDLESS[name]
    with server.connect() as raw:
        raw.sendall(begin)
        sent = 0
        raw.setblocking(False)
        while sent < 4 * MAX_RAW_HEADER_BYTES:
            try:
                sent += raw.send(more * 20)
            except BlockingIOError:
                time.sleep(0.001)
        raw.setblocking(True)
        assert refused(read_all(raw)) == [431]
    eventually(lambda: ended(server, "too_large") > 0)


@pytest.mark.parametrize("extra", [0, 1])
def test_bound_of_the_headers_is_exact(server: Serving, extra: int) -> None:
    """The address, the header lines and their separators all count toward the limit."""
    headers = [(b"host", b"localhost"), (b"connection", b"close"), (b"x-b", b"c" * 5000)]
    headers += [(b"x-%d" % i, b"") for i in range(100)]
    room = MAX_HEADER_BYTES - head_size(len(b"/version"), headers) - 4 - len(b"x-a")
    headers.append((b"x-a", b"d" * (room + extra)))
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    with server.connect() as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\n" + lines + b"\r\n")
        status, body = answers(read_all(raw))[0]
    assert status == (431 if extra else 200)
    assert not extra or str(MAX_HEADER_BYTES).encode() in body


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[bytes], list[int]]:
    """Pipelined requests, and the statuses of their answers."""
    requests, statuses = [], []
    for _ in range(draw(st.integers(1, 5))):
        match draw(st.sampled_from(["get", "post", "chunked", "upgrade", "long", "too long"])):
            case "get":
                requests.append(GET)
            case "post":
                requests.append(request_bytes("/tokenize", {"prompt": "a" * draw(sizes)}))
            case "chunked":
                requests.append(chunked(json.dumps({"prompt": "a" * draw(sizes)}).encode(), draw))
            case "upgrade":
                upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c")
                requests.append(request_bytes("/tokenize", {"prompt": "ab"}, *upgrade))
            case "long":
                requests.append(GET[:-2] + b"X-A: " + b"b" * 60_000 + b"\r\n\r\n")
            case "too long":
                size = MAX_HEADER_BYTES + draw(st.integers(0, 2 * MAX_RAW_HEADER_BYTES))
                requests.append(GET[:-2] + b"X-A: " + b"b" * size + b"\r\n\r\n")
                statuses.append(431)
                if size > MAX_RAW_HEADER_BYTES - 200:  # the connection is closed after this reply
                    return requests, statuses
                continue
        statuses.append(200)
    requests.append(LAST)
    return requests, [*statuses, 200]


sizes = st.integers(1, 3000)


def chunked(body: bytes, draw: st.DrawFn) -> bytes:
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    size = draw(st.integers(1, 500))
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    lines = b"".join(b"%x;a=b\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head + lines + b"0\r\nX-Trailer: c\r\n\r\n"


@given(pipelines(), st.data())
def test_any_split_of_a_pipeline_has_the_same_answers(
    server: Serving, pipeline: tuple[list[bytes], list[int]], data: st.DataObject
) -> None:
    requests, expected = pipeline
    stream = b"".join(requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    with server.connect() as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            try:
                raw.sendall(stream[begin:end])
            except ConnectionError:  # refused and closed: all answers have arrived
                break
            time.sleep(0.001)
        assert [status for status, _ in answers(read_all(raw))] == expected


def test_pipeline_byte_by_byte_has_the_same_answers(server: Serving) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket")
    stream = b"".join(
        [GET, request_bytes("/tokenize", {"prompt": "ab"}, *upgrade), b"\r\n", GET, LAST]
    )
    with server.connect() as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(len(stream)):
            raw.sendall(stream[index : index + 1])
        whole = answers(read_all(raw))
    assert [status for status, _ in whole] == [200] * 4
    assert len(json.loads(whole[1][1])["tokens"]) == 2


def test_requests_ahead_of_their_turn_stay_with_the_client(speller: Serving) -> None:
    """Thousands of requests are sent while the first is answered; all are answered in order."""
    count = 2000
    first = request_bytes("/generate", {"prompt": "a", "max_tokens": 300, "ignore_eos": True})
    with speller.connect() as raw:
        received = bytearray()
        raw.sendall(first)
        raw.setblocking(False)
        stream = memoryview(GET * count + LAST)
        while stream or not received:
            with contextlib.suppress(BlockingIOError):
                stream = stream[raw.send(stream[:65536]) :]
            try:
                received += raw.recv(65536)
            except BlockingIOError:
                time.sleep(0.001)
        raw.setblocking(True)
        received += read_all(raw)
    whole = answers(bytes(received))
    assert [status for status, _ in whole] == [200] * (count + 2)
    assert b'"completion_tokens":300' in whole[0][1]
    assert b'"status":"ok"' in whole[-1][1]


def test_refusal_waits_for_its_turn(speller: Serving) -> None:
    """An invalid request that arrives while another one is being answered is refused after that
    answer."""
    first = request_bytes("/generate", {"prompt": "a", "max_tokens": 200, "ignore_eos": True})
    for wrong, status in ((b"nonsense\r\n\r\n", 400), (b"GET /" + b"a" * 300_000, 431)):
        with speller.connect() as raw:
            raw.sendall(first + GET + wrong)
            assert refused(read_all(raw)) == [200, 200, status]


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("closes", [True, False])
def test_half_closed_connection_counts_as_disconnected(
    speller: Serving, ahead: int, closes: bool
) -> None:
    """The server notices that the client has closed its side, even if the server has stopped
    reading because of pipelined requests."""
    server = speller
    before = server.finished("abort")
    with server.connect() as raw:
        raw.sendall(request_bytes("/generate", {"prompt": "a", "ignore_eos": True}))
        eventually(lambda: server.sample("logitd_kv_slots_used") == 1)
        for _ in range(ahead):
            raw.sendall(GET)
            time.sleep(0.1)
        if not closes:
            raw.shutdown(socket.SHUT_WR)
            assert drained(raw) == b""
    eventually(lambda: server.finished("abort") == before + 1, timeout=10)
    server.wait_idle()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_client_answered_before_its_body_can_read_the_answer(
    hurried: Serving, version: str
) -> None:
    """The server once closed the connection right after the reply. The rest of the body then caused
    a reset, and the client got an error instead of the reply."""
    head = f"POST /tokenize HTTP/{version}\r\nHost: localhost\r\n"
    head += "Content-Type: text/plain\r\nConnection: close\r\n"
    body = b"a" * 600_000
    with hurried.connect() as raw:
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        select.select([raw], [], [], 10)  # the reply has arrived, but was not read
        for start in range(0, len(body), 100_000):
            raw.sendall(body[start : start + 100_000])
            time.sleep(0.01)
        assert refused(read_all(raw)) == [415]


def test_client_that_keeps_sending_after_the_answer_is_ended(hurried: Serving) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: text/plain\r\nConnection: close\r\n"
    with hurried.connect() as raw:
        raw.settimeout(10)
        raw.sendall(head + b"Content-Length: 1000000000\r\n\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            raw.sendall(b"a" * 64 * 2**20)  # more than sockets hold and the server would discard
    eventually(lambda: hurried.sample("logitd_connections") <= 1)


def test_trailers_are_not_headers(server: Serving) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    with server.connect() as raw:
        raw.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n"
            % (len(body), body)
            + b"X-Request-ID: late\r\n\r\n"
        )
        received = read_all(raw)
    assert b" 200 OK" in received
    assert b"late" not in received


# Upgrades


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "h2c, websocket", "TLS/1.0"])
@pytest.mark.parametrize("also", ["HTTP2-Settings", "close"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_request_to_upgrade_is_answered_as_ordinary_http(
    server: Serving, protocol: str, also: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server parses the request again without `Upgrade`, and for that it makes a new parser.
    The first parser would ignore a second request after one with `Connection: close`."""
    headers = {
        "Connection": f"Upgrade, {also}",
        "Upgrade": protocol,
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    for _ in range(2):  # the same connection
        if method == "GET":
            response = server.client.get("/version", headers=headers)
        else:
            response = server.post("/tokenize", {"prompt": "ab"}, **headers)
        assert response.status_code == 200
        assert "upgrade" not in response.headers
    assert [r for r in caplog.records if r.name.startswith("uvicorn")] == []


@pytest.mark.parametrize(
    "sent", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"\x16\x03\x01"]
)
def test_other_protocols_are_answered_400(server: Serving, sent: bytes) -> None:
    with server.connect() as raw:
        raw.sendall(sent)
        assert refused(read_all(raw)) == [400]


@pytest.mark.parametrize(
    ("line", "target"),
    [("CONNECT a.example:443", "a.example:443"), ("GET http://", "http://"),
     ("GET http://[::1/", "http://[::1/")],
)  # fmt: skip
def test_target_without_a_path_is_named(server: Serving, line: str, target: str) -> None:
    with server.connect() as raw:
        raw.sendall(f"{line} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        answer = read_all(raw)
    assert refused(answer) == [400]
    assert f"'{target}', but must be a path".encode() in answer


# Deadlines


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Check that the block lasts as long as the short timeout, and not as long as the default
    timeout."""
    started = time.monotonic()
    yield
    names = ("slow_sender_timeout", "slow_reader_timeout", "keep_alive_timeout")
    defaults = (ServeSettings.model_fields[name].default for name in names)
    assert TIMEOUT < time.monotonic() - started < min(defaults)


def trickle(raw: socket.socket, pause: float, size: int = 1) -> None:
    """Send a few bytes now and then until the connection is closed."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        raw.sendall(b"a" * size)
        time.sleep(pause)


def test_silent_connection_is_ended_without_an_answer(hurried: Serving) -> None:
    with hurried.connect() as raw:
        assert raw.recv(100) == b""
    assert ended(hurried, "silent") == 1


def test_idle_connection_is_closed(hurried: Serving) -> None:
    before = ended(hurried, "idle")
    with in_time(), hurried.connect() as raw:
        raw.sendall(GET)
        assert answers(read_all(raw))[0][0] == 200
    assert ended(hurried, "idle") == before + 1


HALVES = {
    "slow_head": b"GET /version HTTP/1.1\r\n",
    "slow_body": request_bytes("/tokenize", {"prompt": "a" * 200})[:-150],
}


@pytest.mark.parametrize("reason", HALVES)
@pytest.mark.parametrize("pause", [None, 0.2])
def test_half_a_request_is_answered_408(hurried: Serving, reason: str, pause: float | None) -> None:
    """An occasional byte does not prevent the timeout, because a body must keep a minimum average
    rate."""
    before = ended(hurried, reason)
    with in_time(), hurried.connect() as raw:
        raw.sendall(HALVES[reason])
        if pause is not None:
            with pytest.raises(ConnectionError):
                trickle(raw, pause)
        else:
            assert refused(read_all(raw)) == [408]
    assert ended(hurried, reason) == before + 1
    hurried.wait_idle()


def test_slow_upload_is_served(hurried: Serving) -> None:
    """The upload takes three times the timeout, at ten times the required rate."""
    whole = request_bytes("/tokenize", {"prompt": "a" * int(30 * TIMEOUT * MIN_BYTES_PER_SECOND)})
    with hurried.connect() as raw:
        step = MIN_BYTES_PER_SECOND * 5 // 4
        for begin in range(0, len(whole), step):
            raw.sendall(whole[begin : begin + step])
            time.sleep(0.12)
        assert b" 200 OK" in read_until(raw, b'"tokens"')


def test_endless_body_after_the_answer_is_ended(hurried: Serving) -> None:
    """The request is answered with 415 after its headers. Its body is then read and discarded, but
    only for a while."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
    with hurried.connect() as raw:
        raw.sendall(head)
        assert b" 415 " in read_until(raw, b"\r\n\r\n")
        with pytest.raises(ConnectionError):
            trickle(raw, 0.01, 4096)


def test_unread_reply_is_ended(
    hurried: Serving, large_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = ended(hurried, "unread")
    with hurried.connect(receive_buffer=65536) as raw:
        raw.sendall(request_bytes(*LARGE))
        eventually(lambda: ended(hurried, "unread") == before + 1)
        assert len(drained(raw)) < large_size
    eventually(lambda: any("too little of a reply was read" in line for line in caplog.messages))


def test_trickling_reader_is_ended_and_slow_one_is_not(hurried: Serving, large_size: int) -> None:
    before = ended(hurried, "unread")
    with hurried.connect(receive_buffer=2048) as raw:
        raw.sendall(request_bytes(*LARGE, "Connection: close"))
        deadline = time.monotonic() + 40
        while ended(hurried, "unread") == before:
            raw.recv(50)
            time.sleep(0.1)  # 500 bytes/s
            assert time.monotonic() < deadline
    with hurried.connect(receive_buffer=WINDOW) as raw:
        raw.sendall(request_bytes(*LARGE, "Connection: close"))
        received = 0
        while piece := raw.recv(WINDOW):
            received += len(piece)
            time.sleep(0.02)
        assert received > large_size
    assert ended(hurried, "unread") == before + 1


def test_oldest_large_replies_are_ended_if_unread_replies_take_too_much(
    server: Serving, large_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads 2 KiB/s may take an hour for one reply."""
    monkeypatch.setattr(
        "logitd.service.connections.open_connections.HELD_BYTES", large_size * 5 // 2
    )
    before = ended(server, "held")
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(server.connect(receive_buffer=4096)) for _ in range(4)]
        for number, raw in enumerate(readers):
            raw.sendall(request_bytes(*LARGE, "Connection: close"))
            assert raw.recv(10) == b"HTTP/1.1 2"
            time.sleep(1.2)  # the timer checks connections every second
            eventually(lambda n=number: ended(server, "held") == before + max(0, n - 1))  # type: ignore[misc]
        assert [len(drained(raw)) >= large_size for raw in readers] == [False, False, True, True]


def drained(raw: socket.socket) -> bytes:
    """All bytes until the end or a reset."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(65536):
            received += piece
    return received


# Shutdown


def test_shutdown_does_not_wait_for_stuck_clients(spelling_path: Path) -> None:
    """Each client has sent nothing, half of the headers or half of a body, or does not read its
    reply."""
    rows = {"prompt": "abc" * 1000, "positions": "all"}
    starts: list[bytes] = [
        b"",
        b"GET / HT",
        request_bytes("/generate", {"prompt": "abc"})[:-3],
        GET,
        request_bytes(*LARGE),
        request_bytes("/logits", rows),
    ]
    with (
        # Cold: with all modules of a zygote, the interpreter takes longer to exit.
        ServedProcess(
            *("--checkpoint", str(spelling_path), "--threads", "1", "--drain-timeout", "1"),
            cold=True,
        ) as server,
        contextlib.ExitStack() as stack,
    ):
        held = []
        for start in starts:
            raw = stack.enter_context(server.connect(receive_buffer=2048))
            raw.sendall(start)
            held.append(raw)
        eventually(lambda: server.sample("logitd_kv_slots_used") == 1)
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert time.monotonic() - started < 15, "far less than any timeout of these clients"
        held[2].settimeout(5)
        assert b" 503 " in drained(held[2])
        assert "Traceback" not in server.output
        assert "CancelledError" not in server.output


def test_reply_that_is_being_read_is_finished_at_shutdown(spelling_path: Path) -> None:
    with ServedProcess("--checkpoint", str(spelling_path), "--threads", "1") as server:
        with server.connect(receive_buffer=WINDOW) as raw:
            raw.sendall(request_bytes(*LARGE))
            head, _, body = read_until(raw, b"\r\n\r\n").partition(b"\r\n\r\n")
            received = len(body)
            server.signal(signal.SIGTERM)
            while piece := raw.recv(WINDOW):
                received += len(piece)
                time.sleep(0.03)
            assert b"content-length: %d" % received in head
        assert server.exit_code() == 0
