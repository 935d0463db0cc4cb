"""Streamed replies: the bytes of an event, and the end of a stream when its reader leaves. Tests
run the response as an ASGI server does, with `receive` and `send`; tests/e2e uses real sockets.
"""

import asyncio
import itertools
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from logitd.service.errors import unavailable
from logitd.service.http.sse import DONE, KEEP_ALIVE, StreamedResponse, event

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NEVER = 60.0
"""A write timeout longer than any test."""


class Connection:
    """The client's side of ASGI: the received messages, and its disconnection."""

    def __init__(self, accept: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self._accept = accept

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._accept is not None:
            await self._accept(len(self.sent))
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def ended(self) -> bool:
        return self.sent[-1].get("more_body") is False


class PatientLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting."""

    def __init__(self) -> None:
        super().__init__(_Jumps(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Jumps(selectors.DefaultSelector):
    def __init__(self, loop: PatientLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now += timeout or 0.0
        return super().select(timeout and 0)


class Ends:
    """Counts how often a stream calls it at its end."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def run(
    pieces: AsyncIterator[bytes], connection: Connection, ends: Ends, timeout: float = NEVER
) -> None:
    response = StreamedResponse(
        pieces,
        on_end=ends,
        write_timeout=timeout,
        media_type="text/event-stream",
        headers={"X-More": "1"},
    )
    await response({"type": "http"}, connection.receive, connection.send)


async def some(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


# The format


def test_fixed_lines_have_exact_bytes() -> None:
    assert event({"text": "é\r\n"}) == 'data: {"text":"é\\r\\n"}\n\n'.encode()
    assert DONE == b"data: [DONE]\n\n"
    assert KEEP_ALIVE == b": keep-alive\n\n"


# The response


async def test_pieces_are_sent_as_they_come_with_headers_for_proxies() -> None:
    connection, ends = Connection(), Ends()
    await run(some(b"one", b"two"), connection, ends)
    start, *bodies = connection.sent
    assert start["status"] == 200
    headers = dict(start["headers"])
    assert headers == {
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
        b"x-more": b"1",
        b"content-type": b"text/event-stream; charset=utf-8",
    }
    assert [body["body"] for body in bodies] == [b"one", b"two", b""]
    assert connection.ended
    assert ends.count == 1


@pytest.mark.parametrize("pieces", [[b"one"], [b"one" + DONE], [b"one", DONE], []])
async def test_stream_ends_before_its_last_bytes_are_sent(pieces: list[bytes]) -> None:
    ends = Ends()
    counts: list[int] = []

    async def note(_: int) -> None:
        counts.append(ends.count)

    connection = Connection(note)
    await run(some(*pieces), connection, ends)
    assert connection.body == b"".join(pieces)
    assert connection.ended
    assert counts == [0] * (len(counts) - 1) + [1]
    assert connection.sent[-1]["body"].endswith(DONE) == (DONE in connection.body)


async def test_endless_stream_ends_with_its_client() -> None:
    connection, ends = Connection(), Ends()

    async def endless() -> AsyncIterator[bytes]:
        for number in itertools.count():  # never really waits
            if number == 100:
                connection.gone.set()
            yield b"x"

    await asyncio.wait_for(run(endless(), connection, ends), NEVER)
    assert ends.count == 1
    assert len(connection.sent) < 200
    assert not connection.ended


@pytest.mark.parametrize(("seconds", "complete"), [(120, True), (140, False)])
def test_large_piece_may_be_read_at_the_lowest_rate(seconds: float, complete: bool) -> None:
    """At 2 KiB/s a piece of 256 KiB takes 128 s."""

    async def main() -> None:
        async def accept(number: int) -> None:
            await asyncio.sleep(seconds if number == 1 else 0)

        connection, ends = Connection(accept), Ends()
        await run(some(bytes(2**18)), connection, ends, 5)
        assert connection.sent[-1].get("more_body", True) is not complete

    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize("stuck_at", [1, 3], ids=["at a piece", "at the end of the body"])
async def test_stopped_reader_is_disconnected(
    stuck_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def accept(number: int) -> None:
        if number == stuck_at:
            await asyncio.Event().wait()

    connection, ends = Connection(accept), Ends()
    await asyncio.wait_for(run(some(b"one", b"two"), connection, ends, 0.01), NEVER)
    assert ends.count == 1
    assert len(connection.sent) == stuck_at
    assert caplog.messages == ["a client left a reply unread for 0.01 s"]


def test_slow_reader_is_not_disconnected() -> None:
    async def main() -> None:
        async def accept(number: int) -> None:
            await asyncio.sleep(0.06)

        connection, ends = Connection(accept), Ends()
        await run(some(*[b"x"] * 8), connection, ends, 0.45)  # 0.6 s in all, 0.06 s each
        assert connection.ended
        assert connection.body == b"x" * 8

    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        runner.run(main())


async def test_failure_midway_leaves_the_body_incomplete(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"one"
        raise unavailable("the server is shutting down")

    connection, ends = Connection(), Ends()
    await run(failing(), connection, ends)
    assert ends.count == 1
    assert connection.body == b"one"
    assert not connection.ended
    assert caplog.messages == ["a reply was broken off: the server is shutting down"]


async def test_our_own_bug_ends_the_request_and_is_not_hidden() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"one"
        raise ZeroDivisionError

    connection, ends = Connection(), Ends()
    with pytest.raises(ZeroDivisionError):
        await run(broken(), connection, ends)
    assert ends.count == 1


@given(TEXT | st.text("\u0085\u2028\u2029\x0b\x0c\x1c\x1d\x1e\r\na"))
def test_event_is_one_line_for_any_reader_of_lines(text: str) -> None:
    """Like Python, httpx also splits lines at Unicode's line separators, and so it once cut an
    event in half."""
    lines = event({"text": text}).decode().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}
    assert lines[1] == ""
