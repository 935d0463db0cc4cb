"""Clients that end their side and wait for the reply, as `nc -N` does: they are answered; and those
that only seemed to wait are noticed. Real servers and real sockets.

It was the other way round once: whoever said no more was taken for gone, and closed without a byte.
"""

import asyncio
import contextlib
import ctypes
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from logitd.service.connections import listening
from logitd.service.connections.listening import INTERIM, Listening
from tests.service.serving import (
    Serving,
    dechunked,
    events,
    eventually,
    read_all,
    read_until,
    request_bytes,
    serving,
)
from tests.service.spelling import long_prompt

AT_ONCE = 10.0
LONG: dict[str, Any] = {"prompt": "a", "ignore_eos": True, "n": 2}
"""Two sequences of 8,191 tokens."""
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "seed": 1}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "probabilities": ("/probs", {"prompt": "ab"}),
    "one reply": ("/generate", SHORT),
    "a stream": ("/generate", SHORT | {"stream": True}),
    "openai reply": ("/v1/completions", SHORT),
    "openai stream": ("/v1/completions", SHORT | {"stream": True}),
    "rows": ("/logits", {"prompt": long_prompt(600), "positions": "all"}),
    "an error": ("/generate", {"prompt": 1}),
}


@pytest.fixture(scope="module")
def server(spelling_path: Path) -> Iterator[Serving]:
    with serving(spelling_path, slots=2, max_queue=40) as running:
        yield running


def end_its_side(raw: socket.socket) -> None:
    raw.shutdown(socket.SHUT_WR)


def without_interim(received: bytes) -> bytes:
    """A final response, behind any number of interim ones."""
    while received.startswith(INTERIM):
        received = received.removeprefix(INTERIM)
    return received


def body_of(reply: bytes) -> bytes:
    head, _, body = reply.partition(b"\r\n\r\n")
    return b"".join(dechunked(reply)) if b"chunked" in head.lower() else body


def comparable(body: bytes) -> Any:
    """What a reply says, without what is its own: ids, times, and how a stream is cut."""
    if body.startswith(b"data: "):
        return "".join(choice["text"] for part in events(body) for choice in part["choices"])
    reply = {k: v for k, v in orjson.loads(body).items() if k not in ("id", "created")}
    return [choice["text"] for choice in reply["choices"]] if "choices" in reply else reply


@pytest.mark.parametrize("name", BODIES)
def test_who_ends_its_side_has_the_same_reply(server: Serving, name: str) -> None:
    path, body = BODIES[name]
    with server.connect() as raw, server.connect() as other:
        raw.sendall(request_bytes(path, body))
        end_its_side(raw)
        reply = without_interim(read_all(raw))
        other.sendall(request_bytes(path, body, "Connection: close"))
        assert comparable(body_of(reply)) == comparable(body_of(read_all(other)))


def test_who_ends_its_side_in_the_queue_is_answered_in_its_turn(server: Serving) -> None:
    with server.connect() as running, server.connect() as raw:
        running.sendall(request_bytes("/generate", LONG))
        eventually(lambda: server.sample("logitd_num_sequences_running") == 2)
        raw.sendall(request_bytes("/generate", SHORT))
        end_its_side(raw)
        eventually(lambda: server.sample("logitd_num_sequences_waiting") == 1)
        assert read_until(raw, INTERIM) == INTERIM
        running.close()
        assert orjson.loads(body_of(without_interim(read_all(raw))))["choices"]


def test_requests_behind_one_another_are_all_answered(server: Serving) -> None:
    requests = [request_bytes("/generate", SHORT | {"seed": seed}) for seed in range(3)]
    with server.connect() as raw:
        raw.sendall(b"".join(requests))
        end_its_side(raw)
        received = read_all(raw)
    assert received.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("body", [LONG, LONG | {"stream": True}], ids=["one reply", "a stream"])
def test_who_ends_its_side_and_then_leaves_is_noticed(server: Serving, body: Any) -> None:
    """The second time it says nothing: its end was sent already."""
    before = server.finished("abort")
    with server.connect() as raw:
        raw.sendall(request_bytes("/generate", body))
        end_its_side(raw)
        eventually(lambda: server.sample("logitd_num_sequences_running") == 2)
        if not body.get("stream"):
            assert read_until(raw, INTERIM) == INTERIM  # read, so that closing sends no reset
        time.sleep(0.2)
        assert server.sample("logitd_num_sequences_running") == 2
    started = time.monotonic()
    server.wait_idle()
    assert time.monotonic() - started < AT_ONCE
    assert server.finished("abort") == before + 2


def test_half_a_request_has_no_reply(server: Serving) -> None:
    request = request_bytes("/generate", SHORT)
    for size in (0, 20, len(request) - 1):
        with server.connect() as raw:
            raw.sendall(request[:size])
            end_its_side(raw)
            assert read_all(raw) == b""


def test_the_whole_requests_before_half_a_one_are_answered(server: Serving) -> None:
    request = request_bytes("/generate", SHORT)
    with server.connect() as raw:
        raw.sendall(request + request[:-1])
        end_its_side(raw)
        assert read_all(raw).count(b"HTTP/1.1 200 OK") == 1


def test_nothing_is_sent_ahead_of_a_reply_over_http_1_0(server: Serving) -> None:
    """Its clients know no interim responses, so the end of a side is the end of a client."""
    before = server.finished("abort")
    with server.connect() as raw:
        raw.sendall(request_bytes("/generate", LONG).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        eventually(lambda: server.sample("logitd_num_sequences_running") == 2)
        end_its_side(raw)
        assert read_all(raw) == b""
    server.wait_idle()
    assert server.finished("abort") == before + 2


DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)
"""A socket filter of one instruction: no byte of a segment is kept."""


def hide(raw: socket.socket) -> None:
    """Drop whatever arrives for a socket, before TCP sees it: nothing is acknowledged or reset."""
    program = ctypes.create_string_buffer(DROP_ALL)
    raw.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", 1, ctypes.addressof(program)))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not say what came back")
@pytest.mark.parametrize("client", ["closed", "hidden", "listens"])
def test_asked_once_a_client_is_known(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    """One that has closed answers with a reset. From one behind a firewall that drops resets comes
    nothing. One that acknowledges and says nothing listens, even to a server that was itself
    stopped for longer than it would wait."""
    monkeypatch.setattr(listening, "UNANSWERED_SECONDS", 0.3)
    assert asyncio.run(_is_gone(client)) == (client != "listens")


async def _is_gone(client: str) -> bool:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    made: list[asyncio.Transport] = []

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            made.append(transport)
            self.listening = Listening(transport, loop)

        def eof_received(self) -> bool:
            loop.call_later(0.1, lambda: self.listening.ask(interim=True))
            if client == "listens":
                loop.call_later(0.2, time.sleep, 0.5)
                loop.call_later(0.8, lambda: self.listening.ask(interim=False))
            return True

        def connection_lost(self, exc: Exception | None) -> None:
            self.listening.end()
            ended.set()

    listener = await loop.create_server(Server, "127.0.0.1", 0)
    with socket.create_connection(listener.sockets[0].getsockname()) as raw:
        await asyncio.sleep(0.1)
        if client == "hidden":
            hide(raw)
        if client == "closed":
            raw.close()
        else:
            end_its_side(raw)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 1.0 if client == "listens" else AT_ONCE)
    gone = ended.is_set()
    listener.close()
    for transport in made:
        transport.abort()
    await ended.wait()
    return gone
