"""A server that sends a test's replies byte by byte.

It simulates faults that a real server does not have on demand: two refusals and then a reply,
silence, a broken connection, a proxy.
"""

import json
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from tests.service.serving import TEST_TIMEOUT

SSE = "Content-Type: text/event-stream"


@dataclass(frozen=True)
class Script:
    """The reply to one request. Afterwards the connection is closed, kept for the next request, or
    held open in silence until the client closes it."""

    answer: bytes
    then: Literal["close", "keep", "hold"] = "keep"


class ScriptedServer:
    """Answers each request with the next script, and closes the connection after the last script.

    requests     whole requests that have arrived
    connections  number of connections so far
    left         set once a client has closed a connection that is held open
    """

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.left = threading.Event()
        self._scripts = deque(scripts)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        # Closing alone does not end `accept` and `recv` of other threads.
        for one in (self._listening, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(TEST_TIMEOUT)

    def header(self, name: str, request: int = 0) -> str | None:
        """The value of a request's header."""
        for line in self.requests[request].partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]:
            found, _, value = line.partition(": ")
            if found.lower() == name.lower():
                return value
        return None

    def body(self, request: int = 0) -> Any:
        return json.loads(self.requests[request].partition(b"\r\n\r\n")[2])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while request := _read_request(connection):
                self.requests.append(request)
                if not self._scripts:
                    break
                script = self._scripts.popleft()
                connection.sendall(script.answer)
                if script.then == "hold" and not connection.recv(1):
                    self.left.set()
                if script.then != "keep":
                    break
        except OSError:
            self.left.set()
        finally:
            connection.close()


@contextmanager
def scripted(*scripts: Script | bytes) -> Iterator[ScriptedServer]:
    """Run a server with these replies, in order. After a reply given as bytes, the connection stays
    open."""
    server = ScriptedServer([Script(one) if isinstance(one, bytes) else one for one in scripts])
    try:
        yield server
    finally:
        server.close()


def reply(status: int, body: Any, *headers: str, length: int | None = None) -> bytes:
    """A reply as bytes. The body is JSON unless it is bytes; `length` overrides the Content-Length
    header."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    stated = len(content) if length is None else length
    lines = [f"HTTP/1.1 {status} Some Phrase", f"Content-Length: {stated}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def refusal(status: int, *headers: str, **members: Any) -> bytes:
    error = {"message": f"no, says {status}", "type": "t", "param": None, "code": None} | members
    return reply(status, {"error": error}, *headers)


def events(*data: Any, end: bool = True, whole: bool = True) -> bytes:
    """A stream of events, optionally without its [DONE] or the last chunk of its body."""
    parts = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in data]
    body = b"".join(parts) + (b"data: [DONE]\n\n" if end else b"")
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + SSE.encode() + b"\r\n\r\n"
    return head + b"%x\r\n%s\r\n" % (len(body), body) + (b"0\r\n\r\n" if whole else b"")


def _read_request(connection: socket.socket) -> bytes:
    """A whole request; empty if the client has closed the connection."""
    received = bytearray()
    while (at := received.find(b"\r\n\r\n")) < 0:
        if not (data := connection.recv(65536)):
            return b""
        received += data
    head = bytes(received[:at]).decode().lower()
    length = next(
        (int(line.removeprefix("content-length: ")) for line in head.split("\r\n")
         if line.startswith("content-length: ")),
        0,
    )  # fmt: skip
    while len(received) < at + 4 + length:
        received += connection.recv(65536)
    return bytes(received)
