"""Protocol: one HTTP connection, as uvicorn's with bounds on what its client may do.

Added to uvicorn's protocol over httptools: bounds on the bytes of a head and on the time a client
takes (`reading.py`), checked by one timer for all connections; requests that are sent ahead wait in
the client's socket for their turn; refusals are answered in turn too (`refusals.py`); an answer
that comes before the whole body is read by the client before the connection closes; requests to
upgrade are answered as ordinary HTTP. A client that ends its side of the connection counts as gone.

Not here: how many connections there may be (`open_connections.py`), what requests mean
(`service/http/`).
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from logitd.service.connections.open_connections import EvictionClass, OpenConnections
from logitd.service.connections.reading import Reading, ReadState, ReplyProgress
from logitd.service.connections.refusals import (
    headers_too_large,
    not_http,
    too_many_connections,
    too_slow,
    whole_reply,
)
from logitd.service.connections.tcp import tcp_info
from logitd.service.errors import ApiError, unavailable
from logitd.service.metrics.metrics import ConnectionEnd

PIECE = 16 * 1024
"""Bytes that the parser gets at once: between two pieces it is decided whether to go on."""
LINGER_SECONDS = 2.0
"""Time for a client that is still sending when it is refused to stop and read the answer: closing
at once would reset the connection, and the answer with it."""
SHUTDOWN_SECONDS = 0.5
"""At shutdown, a connection that takes nothing of its reply for this long is aborted."""


class ReplyTransport:
    """The transport as a reply sees it. uvicorn closes it behind the last reply of a connection."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class Connection(HttpToolsProtocol):
    """One connection. uvicorn calls a request and its reply a `cycle`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: OpenConnections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = connections
        self._limits = connections.limits
        self._reading = Reading(self.loop.time())
        self._progress = ReplyProgress()
        self._running: RequestResponseCycle | None = None  # its reply is not complete
        self._held = bytearray()  # received ahead of its turn
        self._upgrade = False  # the message asks for another protocol
        self._served = False  # a reply was written
        self._refusal: ApiError | None = None  # waits for its turn
        self._linger_until: float | None = None  # the last answer is written
        self._shutdown_timer: asyncio.TimerHandle | None = None

    # Called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        if self._shutdown_timer is not None:
            self._shutdown_timer.cancel()
        self._held.clear()
        self.pipeline.clear()
        if self._running is not None:  # uvicorn tells the latest only
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._reading.received += len(data)
        if self._reading.state is ReadState.NOTHING:
            if self._reading.has_discarded_enough():
                self.flow.pause_reading()
            return
        if self._reading.state is ReadState.REQUEST:
            self._reading.begin_head(self.loop.time())
        self._feed(data)

    # Called by OpenConnections

    def abort(self) -> None:
        self.transport.abort()

    def unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def check(self, now: float) -> None:
        """End the connection, or answer it, if a deadline has passed or the client has gone."""
        unsent, answered = self.unsent(), self._running is None
        info = tcp_info(self.transport) if unsent or self.flow.read_paused else None
        acknowledged = None if info is None else info.acknowledged
        timeout = self._limits.slow_reader_timeout
        if self._progress.is_too_slow(now, timeout, unsent, acknowledged, complete=answered):
            self._all.reports.count(ConnectionEnd.UNREAD)
            self.transport.abort()
        elif self._linger_until is not None:
            if unsent:  # the time to read begins with the end of the reply
                self._linger_until = now + LINGER_SECONDS
            elif now >= self._linger_until:
                self.transport.abort()
        elif self.transport.is_closing():
            return
        elif not answered and self.flow.read_paused and info is not None and info.gone:
            self.transport.abort()  # while nothing is read, its end does not show by itself
        elif self._reading.state is ReadState.BODY:
            self._check_body(now)
        elif answered and unsent:  # the reply is still being read
            self._reading.since = now
        elif answered:
            self._check_head(now - self._reading.since)

    # Called by uvicorn's server

    def shutdown(self) -> None:
        """Refuse what has not been received whole; let go of replies that are not being read."""
        self._abort_later_unless_reading(acknowledged=0)
        if self._reading.state is ReadState.BODY:
            self._refuse(unavailable("the server is shutting down"))
        elif self._running is not None:
            self._running.keep_alive = False
            self.pipeline.clear()
        elif self._linger_until is None:
            self.transport.close()

    # Called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._upgrade = False
        self._reading.begin_head(self.loop.time())

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrade = True
            return
        super().on_headers_complete()
        close = partial(self._close_behind, self.cycle)
        self.cycle.transport = ReplyTransport(self.transport, close)  # type: ignore[assignment]
        self.headers = []  # trailers come too late to mean anything
        self._reading.begin_body(self.loop.time())

    def on_body(self, body: bytes) -> None:
        self._reading.add_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrade:
            super().on_message_complete()
            self._reading.end_message()

    # Requests and replies

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._all.place(self, EvictionClass.ANSWERED)
        if not self._all.has_room() and not cycle.scope["path"].startswith("/health"):
            app = too_many_connections
            self._all.reports.count(ConnectionEnd.REFUSED)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """As uvicorn's, but for its timer of idle connections: `check` ends them."""
        self.server_state.total_requests += 1
        self._running, self._served = None, True
        self._reading.end_reply(self.loop.time())
        if self.transport.is_closing() or self._linger_until is not None:
            return
        self._all.place(self, EvictionClass.WAITS)
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if not self.pipeline and self._held:
            held = bytes(self._held)
            self._held.clear()
            self._feed(held)
        if self._running is None and self._refusal is not None:
            self._answer(self._refusal)
        elif not self._held and not self.pipeline:
            self.flow.resume_reading()

    def _close_behind(self, cycle: RequestResponseCycle) -> None:
        """Close behind the last reply. The client may still be sending the body."""
        sending = self._reading.state in (ReadState.BODY, ReadState.NOTHING)
        if sending and cycle is self.cycle and cycle.response_complete:
            self._linger()
        else:
            self.transport.close()

    # Bytes

    def _feed(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            if self._reading.state is ReadState.NOTHING:
                return
            if self.pipeline:  # this is ahead of its turn; the rest stays with the client
                self._held += data[start:]
                self.flow.pause_reading()
                return
            self._parse(data[start : start + PIECE])
        if self._running is not None:
            sends = self._reading.state is ReadState.BODY
            self._all.place(self, EvictionClass.SENDS if sends else EvictionClass.ANSWERED)

    def _parse(self, piece: bytes) -> None:
        rest = piece
        while rest:
            try:
                self.parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as stopped:
                rest = self._without_upgrade() + rest[stopped.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse(not_http(error), ConnectionEnd.NOT_HTTP)
                return
        if self._reading.is_too_large(len(piece)):
            self._refuse(headers_too_large(), ConnectionEnd.TOO_LARGE)

    def _without_upgrade(self) -> bytes:
        """The head of a request to upgrade, as that of an ordinary one, for a new parser: the old
        one takes the body for another protocol."""
        if not self._upgrade:
            return b""
        line = self.parser.get_method() + b" " + self.url
        line += b" HTTP/" + self.parser.get_http_version().encode() + b"\r\n"
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return line + b"".join(b"%s: %s\r\n" % header for header in kept) + b"\r\n"

    # Deadlines

    def _check_body(self, now: float) -> None:
        timeout, paused = self._limits.slow_sender_timeout, self.flow.read_paused
        answered = self._running is None
        if self._reading.is_body_slow(now, timeout, answered=answered, paused=paused):
            self._refuse(too_slow("the body", timeout), ConnectionEnd.SLOW_BODY)

    def _check_head(self, waited: float) -> None:
        timeout = self._limits.slow_sender_timeout
        if self._reading.state is ReadState.HEAD:
            if waited > timeout:
                self._refuse(too_slow("the headers", timeout), ConnectionEnd.SLOW_HEAD)
            return
        # Browsers open connections ahead, and show an answer to nothing as one to something.
        end = ConnectionEnd.IDLE if self._served else ConnectionEnd.SILENT
        if waited > (self._limits.keep_alive_timeout if self._served else timeout):
            self._all.reports.count(end)
            self.transport.close()

    def _abort_later_unless_reading(self, acknowledged: int) -> None:
        """Abort in a moment, unless by then the client has taken more than this of its reply."""
        self._shutdown_timer = self.loop.call_later(
            SHUTDOWN_SECONDS, self._abort_unless_reading, acknowledged
        )

    def _abort_unless_reading(self, acknowledged: int) -> None:
        info = tcp_info(self.transport)
        reading = info is not None and info.acknowledged > acknowledged and self.unsent() > 0
        if info is not None and reading and self.loop.time() < self._all.reply_deadline:
            self._abort_later_unless_reading(info.acknowledged)
        else:
            self.transport.abort()

    # Refusals

    def _refuse(self, error: ApiError, end: ConnectionEnd | None = None) -> None:
        """Answer what is awaited with an error, in its turn, and nothing after it."""
        if end is not None:
            self._all.reports.count(end)
        self._held.clear()
        if self._reading.state is ReadState.BODY:
            if self.cycle.response_complete:
                self._linger()
                return
            self._give_up(self.cycle)
        self._reading.stop()
        self._refusal = error
        if self._running is None:
            self._answer(error)

    def _give_up(self, cycle: RequestResponseCycle) -> None:
        """Let a request go whose body will not be whole."""
        if cycle is not self._running:  # it waits for its turn
            self.pipeline.popleft()
        elif cycle.response_started:
            cycle.keep_alive = False
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self._running = None

    def _answer(self, error: ApiError) -> None:
        """Write a refusal, and close when the client has had time to read it."""
        self.transport.write(whole_reply(error, self.server_state.default_headers))
        self._linger()

    def _linger(self) -> None:
        """Write nothing more, and discard what the client still sends."""
        if self.transport.is_closing():
            return
        self._reading.stop()
        self._linger_until = self.loop.time() + LINGER_SECONDS
        self.transport.write_eof()
        self.flow.resume_reading()
