"""Connections: what a client can do with bytes, silence and slowness, before any key is looked at.

Each attack holds what it can while another client asks for /health on new connections.
"""

import contextlib
import json
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.e2e.server import ServedProcess
from tests.faults.attack import Attack, Ground, resident_mib
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt

MIB = 2**20
QUICK = ("--slow-sender-timeout", "3", "--slow-reader-timeout", "3", "--keep-alive-timeout", "3")
POST = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "header lines": (b"GET / HTTP/1.1\r\n", b"X-A: " + b"b" * 59 + b"\r\n"),
    "a header": (b"GET / HTTP/1.1\r\nX-A: ", b"b" * 64),
    "an address": (b"GET /", b"b" * 64),
    "a chunk's extension": (CHUNKED + b"1;a=", b"b" * 64),
    "requests ahead of their turn": (
        b"",
        b"GET /version HTTP/1.1\r\nHost: a\r\n" + b"a:b\r\n" * 5 + b"\r\n",
    ),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"X-A: " + b"b" * 59 + b"\r\n"),
}
LARGE = {"prompt": [[5] * 1000], "max_tokens": 1, "prompt_logprobs": 160}
"""A reply of 12 MB in one piece."""


class Watch:
    """Asks for /health on one new connection after the other, in a thread of its own."""

    def __init__(self, server: ServedProcess) -> None:
        self._url = server.url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answered = 0
        self.slowest = 0.0
        self.failures: list[str] = []

    def _ask(self) -> None:
        while not self._stop.is_set():
            started = time.perf_counter()
            try:
                response = httpx.get(f"{self._url}/health", trust_env=False, timeout=10)
                self.answered += response.status_code == 200
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
            self.slowest = max(self.slowest, time.perf_counter() - started)
            self._stop.wait(0.05)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def held(self) -> str:
        """How it went; AssertionError where /health did not answer, or took long."""
        assert not self.failures, f"/health failed {len(self.failures)} times: {self.failures[0]}"
        assert self.answered, "/health was never asked"
        assert self.slowest < 2, f"/health took {self.slowest:.1f} s"
        return f"/health in {1e3 * self.slowest:.0f} ms at most"


def bytes_without_end(ground: Ground, mib: int) -> str:
    """Heads, addresses, chunk extensions, trailers and requests that do not stop."""
    server = ground.serve(cold=True)
    before = resident_mib(server)
    most, sent = 0.0, dict.fromkeys(ENDLESS, 0)
    with Watch(server) as watch:
        for name, (begin, more) in ENDLESS.items():
            with _connect(server) as raw, contextlib.suppress(ConnectionError, TimeoutError):
                raw.settimeout(3)
                raw.sendall(begin)
                while sent[name] < mib * MIB:
                    raw.sendall(more * 1024)
                    sent[name] += 1024 * len(more)
            most = max(most, resident_mib(server) - before)
    assert most < 32, f"the server grew by {most:.0f} MiB"
    health = watch.held()
    largest = max(sent.values()) / MIB
    assert largest < 16, f"{largest:.0f} MiB were taken"  # most of that by the sockets
    return f"{largest:.1f} MiB taken at most, the server grew by {most:.0f} MiB; {health}"


def silence(ground: Ground, count: int) -> str:
    """More connections than the process has descriptors, which say nothing and stay."""
    server = ground.serve(descriptors=256)
    with ExitStack() as stack:
        held = [stack.enter_context(_opening(server)) for _ in range(count)]
        time.sleep(1)
        with Watch(server) as watch:
            time.sleep(2)
        health = watch.held()
        assert "see --max-connections" in server.output, "the log does not say why"
        return f"{len(held)} held; {health}"


def slow_senders(ground: Ground, count: int) -> str:
    """Half a head, half a body and nothing at all, each with a byte a second."""
    server = ground.serve(*QUICK)
    own = _sockets(server)
    body = json.dumps({"prompt": "a" * 1000}).encode()
    whole = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    begins = (b"", b"GET /health HTTP/1.1\r\nX-A: ", whole[:-900], CHUNKED + b"3e8\r\n")
    with ExitStack() as stack:
        open_now = []
        for index in range(count):
            raw = stack.enter_context(_connect(server))
            raw.sendall(begins[index % len(begins)])
            open_now.append(raw)
        trickled = [raw for index, raw in enumerate(open_now) if index % len(begins)]
        accepted_by = time.monotonic() + 10  # on a busy machine the kernel has them for a while
        while _sockets(server) < own + count:
            assert time.monotonic() < accepted_by, "they are not accepted"
            time.sleep(0.01)
        with Watch(server) as watch:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and _sockets(server) > own + 1:
                for raw in trickled:
                    with contextlib.suppress(OSError):
                        raw.send(b"a")
                time.sleep(1)
        left = _sockets(server) - own
        assert left <= 1, f"{left} of {count} are still open after 20 s"
        health = watch.held()
    seconds = 20 - (deadline - time.monotonic())
    return f"all of {count} ended after {seconds:.0f} s; {health}"


def unread_replies(ground: Ground, count: int) -> str:
    """Large replies in one piece that nobody reads, or that are read a little at a time."""
    server = ground.serve(
        *QUICK, "--max-queue", "64", checkpoint=_long_checkpoint(ground.folder), cold=True
    )
    _reply_size(server)  # what allocators keep of one is there from now on
    own, before = _sockets(server), resident_mib(server)
    body = json.dumps(LARGE).encode()
    with ExitStack() as stack:
        readers = []
        for _ in range(count):
            raw = stack.enter_context(_connect(server, receive_buffer=4096))
            raw.sendall(POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            readers.append(raw)
        most, deadline = 0.0, time.monotonic() + 30 + 2 * count
        with Watch(server) as watch:
            while time.monotonic() < deadline and not (
                _metric(server, "logitd_sequences_finished_total") > count
                and _sockets(server) <= own + 1
            ):
                most = max(most, resident_mib(server) - before)
                for raw in readers[::2]:
                    with contextlib.suppress(OSError):
                        raw.recv(10)
                time.sleep(0.2)
        left = _sockets(server) - own
        grown = resident_mib(server) - before
        assert left <= 1, f"{left} are still open; the server has grown by {grown:.0f} MiB"
        assert grown < 100, f"the server has grown by {grown:.0f} MiB for good"
        del watch  # JSON of 12 MB at a time keeps the loop
    return f"{count} let go, {most:.0f} MiB at most, {grown:.0f} MiB at the end"


def stopping_with_stuck_clients(ground: Ground, count: int) -> str:
    """SIGTERM while there are half requests, readers that do not read, and idle connections."""
    server = ground.serve("--drain-timeout", "1", checkpoint=_long_checkpoint(ground.folder))
    large = json.dumps(LARGE).encode()
    stream = json.dumps(
        {"prompt": [5], "stream": True, "logprobs": 100, "ignore_eos": True}
    ).encode()
    starts = (
        b"",
        b"GET / HT",
        CHUNKED + b"3e8\r\n",
        b"GET /version HTTP/1.1\r\n\r\n",
        POST + b"Content-Length: %d\r\n\r\n%s" % (len(large), large),
        POST + b"Content-Length: %d\r\n\r\n%s" % (len(stream), stream),
    )
    with ExitStack() as stack:
        for index in range(count):
            raw = stack.enter_context(_connect(server, receive_buffer=4096))
            raw.sendall(starts[index % len(starts)])
        deadline = time.monotonic() + 60
        while _metric(server, "logitd_prompt_tokens_total") < 1000 * (count // len(starts)):
            assert time.monotonic() < deadline, "the replies are not written"
            time.sleep(0.1)
        time.sleep(1)  # and the last of them too
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        code = server.exit_code()
        seconds = time.monotonic() - started
    assert code == 0, f"exit code {code}"
    assert "Traceback" not in server.output, "there is a traceback in the log"
    assert seconds < 1 + 3, f"{seconds:.1f} s to stop, with 1 s to drain"
    return f"exit code 0 after {seconds:.1f} s, with 1 s to drain"


def _connect(server: ServedProcess, receive_buffer: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    host, _, port = server.address.partition(":")
    raw.settimeout(10)
    raw.connect((host, int(port)))
    return raw


def _opening(server: ServedProcess) -> socket.socket:
    """A connection that may be accepted later."""
    raw = socket.socket()
    raw.setblocking(False)
    host, _, port = server.address.partition(":")
    raw.connect_ex((host, int(port)))
    return raw


def _metric(server: ServedProcess, name: str) -> float:
    return server.sample(name)


def _sockets(server: ServedProcess) -> int:
    """Sockets that the server's process has open, whatever it says itself."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    targets = []
    for link in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(str(link.readlink()))
    return sum(target.startswith("socket:") for target in targets)


def _reply_size(server: ServedProcess) -> int:
    response = httpx.post(f"{server.url}/generate", json=LARGE, trust_env=False, timeout=60)
    assert response.status_code == 200, response.text
    assert len(response.content) > 10 * 10**6, "small enough for sockets to hold"
    return len(response.content)


def _long_checkpoint(folder: Path) -> Path:
    """A small model with a context of a thousand tokens."""
    path = folder / "long"
    if not path.exists():
        save_tiny_checkpoint(path, gpt=tiny_gpt(tiny_config(context_length=1024)))
    return path


ATTACKS = (
    Attack(
        "bytes without end",
        "16 MiB taken, as sockets are large; 32 MiB of memory; /health within 2 s",
        bytes_without_end,
        short=20,
        long=400,
    ),
    Attack(
        "silent connections",
        "/health on new connections within 2 s, a line in the log",
        silence,
        short=400,
        long=4000,
    ),
    Attack(
        "slow senders",
        "all ended within 20 s, with a timeout of 3 s; /health within 2 s",
        slow_senders,
        short=60,
        long=600,
    ),
    Attack(
        "unread replies",
        "all let go, and their memory",
        unread_replies,
        short=4,
        long=30,
    ),
    Attack(
        "stopping with stuck clients",
        "exit code 0 within the drain and 3 s, no traceback",
        stopping_with_stuck_clients,
        short=12,
        long=60,
    ),
)
