"""Connections that send without end or never read, and the memory that they take."""

import contextlib
import json
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import ServedProcess
from tests.faults.measures import resident_mib, times
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt

pytestmark = pytest.mark.slow

MIB = 2**20
POST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "header lines": (b"GET / HTTP/1.1\r\n", b"X-A: " + b"b" * 59 + b"\r\n"),
    "a header": (b"GET / HTTP/1.1\r\nX-A: ", b"b" * 64),
    "an address": (b"GET /", b"b" * 64),
    "a chunk's extension": (CHUNKED + b"1;a=", b"b" * 64),
    "requests ahead of their turn": (
        b"",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 5 + b"\r\n",
    ),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"X-A: " + b"b" * 59 + b"\r\n"),
}
LARGE = {"prompt": [[5] * 1000], "max_tokens": 1, "prompt_logprobs": 160}
"""A request whose reply of 12 MB is written in one piece."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    gpt = tiny_gpt(tiny_config(context_length=1024))
    return str(save_tiny_checkpoint(tmp_path / "long", gpt=gpt).path)


def test_endless_bytes_take_no_memory(checkpoint: str) -> None:
    """The server starts cold, because a fork of the zygote still holds memory from earlier
    tests."""
    mib = times(20, 400)
    flags = ("--checkpoint", checkpoint, "--threads", "1")
    with ServedProcess(*flags, cold=True) as server:
        before = resident_mib(server)
        for name, (begin, more) in ENDLESS.items():
            sent = 0
            with (
                server.connect(timeout=3) as raw,
                contextlib.suppress(ConnectionError, TimeoutError),
            ):
                raw.sendall(begin)
                while sent < mib * MIB:
                    raw.sendall(more * 1024)
                    sent += 1024 * len(more)
            assert sent < 16 * MIB, f"{sent:,} bytes of {name} were taken, sockets included"
            assert resident_mib(server) - before < 32, name


def test_unread_replies_are_dropped_with_their_memory(checkpoint: str) -> None:
    count = times(4, 30)
    flags = ("--checkpoint", checkpoint, "--threads", "1", "--max-queue", "64")
    body = json.dumps(LARGE).encode()
    with (
        ServedProcess(*flags, "--slow-reader-timeout", "3", cold=True) as server,
        ExitStack() as stack,
    ):
        reply = httpx.post(f"{server.url}/generate", json=LARGE, trust_env=False, timeout=60)
        assert len(reply.content) > 10 * 10**6, "sockets could hold the reply"
        own, before = _sockets(server), resident_mib(server)
        readers = []
        for _ in range(count):
            raw = stack.enter_context(server.connect(receive_buffer=4096, timeout=10))
            raw.sendall(POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            readers.append(raw)
        deadline = time.monotonic() + 30 + 2 * count
        while (
            server.sample("logitd_sequences_finished_total") <= count or _sockets(server) > own + 1
        ):
            assert time.monotonic() < deadline, f"{_sockets(server) - own} are still open"
            for raw in readers[::2]:  # these clients read a little at a time
                with contextlib.suppress(OSError):
                    raw.recv(10)
            time.sleep(0.2)
        assert resident_mib(server) - before < 100


def _sockets(server: ServedProcess) -> int:
    """Open sockets of the server's process, according to /proc."""
    targets = []
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed in the meantime
            targets.append(str(link.readlink()))
    return sum(target.startswith("socket:") for target in targets)
