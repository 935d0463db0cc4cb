"""Clients that end their side and wait for the reply, as `nc -N` does: they are answered; and those
that only seemed to wait are noticed. Real servers and real sockets.

It was the other way round once: whoever said no more was taken for gone, and closed without a byte.
"""

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from service.connections import listening
from service.connections.listening import INTERIM, Listening
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
    reply = orjson.loads(body)
    reply.pop("id", None)
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


def test_a_client_from_which_nothing_comes_back_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a firewall that drops what it sends no reset arrives; here, its window is full."""
    monkeypatch.setattr(listening, "UNANSWERED_SECONDS", 0.3)
    asyncio.run(_ask_somebody_who_acknowledges_nothing())


async def _ask_somebody_who_acknowledges_nothing() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.listening = Listening(transport, loop)
            transport.write(bytes(2**24))
            self.listening.ask(interim=True)

        def connection_lost(self, exc: Exception | None) -> None:
            self.listening.end()
            ended.set()

    listener = await loop.create_server(Server, "127.0.0.1", 0)
    with socket.create_connection(listener.sockets[0].getsockname()):
        await asyncio.wait_for(ended.wait(), AT_ONCE)
    listener.close()
