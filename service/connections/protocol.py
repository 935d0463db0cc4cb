"""Protocol: an HTTP connection, as in uvicorn but with limits on what the client may do.

Differences from uvicorn's protocol based on httptools:

- the size of the headers is limited, and so is the time that a client may take (`reading.py`); one
  timer checks all connections (`open_connections.py`);
- a client may send requests before it has received earlier replies (pipelining). Each request is
  read only when it is its turn, and refusals (`refusals.py`) are written in turn as well;
- if a request is answered before its body is complete, the client gets time to read the answer
  before the connection is closed;
- a request to upgrade is answered as an ordinary HTTP request;
- a client of HTTP/1.0 gets a body of unknown length without chunks; the body ends with the
  connection;
- a client that closes its side of the connection is treated as disconnected.
"""

import asyncio
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from logitd.service.body_writer import EXTENSION
from logitd.service.connections.open_connections import EvictionClass, OpenConnections
from logitd.service.connections.reading import Reading, ReadState, ReplyProgress, tcp_info
from logitd.service.connections.refusals import (
    headers_too_large,
    not_a_path,
    too_many_connections,
    too_slow,
    whole_reply,
)
from logitd.service.errors import ApiError, unavailable
from logitd.service.metrics.metrics import ConnectionEnd

PIECE = 16 * 1024
"""Number of bytes parsed at a time. The limits are checked after each piece."""
LINGER_SECONDS = 2.0
"""How long a client that is still sending may take to read the last answer. If the server closed
the connection immediately, TCP would reset it, and the client would lose the answer."""
SHUTDOWN_SECONDS = 0.5
"""At shutdown, a client that reads nothing of its reply for this long is disconnected."""


class Connection(HttpToolsProtocol):
    """An HTTP connection. A `cycle` is uvicorn's object for a request and its reply.

        bytes -> _feed -> _parse -> cycle -> _running -> on_response_complete -> the next cycle
                   |        |                   (its turn)       |
                _held    _refuse ------> _refusal ----------> _answer -> _linger -> closed

    Bytes that arrive ahead of their turn wait in `_held`; cycles wait in uvicorn's `pipeline`.
    """

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
        self._settings = connections.settings
        self._reading = Reading(self.loop.time())
        self._progress = ReplyProgress()
        self._largest = 0  # bytes of the largest write since all was sent
        self._running: RequestResponseCycle | None = None  # its reply is incomplete
        self._held = bytearray()  # received ahead of its turn
        self._served = False  # at least one reply was written
        self._refusal: ApiError | None = None  # the last answer, waiting for its turn
        self._linger_until: float | None = None  # set when the last answer is written

    # Called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        self._held.clear()
        self.pipeline.clear()
        if self._running is not None:  # uvicorn notifies only the latest one
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._reading.received += len(data)
        if self._reading.state is ReadState.NOTHING:
            if self._reading.received > self._reading.discard_until:
                self.flow.pause_reading()
            return
        if self._reading.state is ReadState.REQUEST:
            self._reading.begin_head(self.loop.time())
        self._feed(data)

    # Called by OpenConnections

    def unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def held(self) -> int:
        """Number of bytes in memory for replies that the client is reading. The bytes of one write
        stay in memory until all of them are sent."""
        unsent = self.unsent()
        return max(unsent, self._largest) if unsent else 0

    def reads_since(self) -> float:
        """The time, on the event loop's clock, when the client began to read; infinite if unknown.
        Valid after `check`, while bytes are held."""
        return math.inf if self._progress.since is None else self._progress.since

    def check(self, now: float) -> None:
        """End the connection, or refuse its request, if a deadline has passed or the client has
        disconnected."""
        unsent, answered = self.unsent(), self._running is None
        info = tcp_info(self.transport) if unsent or self.flow.read_paused else None
        acknowledged = None if info is None else info.acknowledged
        timeout = self._settings.slow_reader_timeout
        if self._progress.is_too_slow(now, timeout, unsent, acknowledged, complete=answered):
            self._all.reports.count(ConnectionEnd.UNREAD)
            self.transport.abort()
        elif self._linger_until is not None:
            if unsent:  # the time starts once everything is sent
                self._linger_until = now + LINGER_SECONDS
            elif now >= self._linger_until:
                self.transport.abort()
        elif self.transport.is_closing():
            return
        elif not answered and self.flow.read_paused and info is not None and info.gone:
            self.transport.abort()  # asyncio does not notice while reading is paused
        elif self._reading.state is ReadState.BODY:
            self._check_body(now)
        elif answered and unsent:  # the client is still reading the reply
            self._reading.since = now
        elif answered:
            self._check_head(now - self._reading.since)

    # Called by uvicorn's server

    def shutdown(self) -> None:
        """Refuse an incomplete request. After SHUTDOWN_SECONDS, disconnect unless the client is
        reading a reply."""
        self.loop.call_later(SHUTDOWN_SECONDS, self._abort_unless_reading, 0)
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
        self._reading.begin_head(self.loop.time())

    def on_headers_complete(self) -> None:
        if self._asks_upgrade():
            return
        super().on_headers_complete()
        # uvicorn closes this transport after a connection's last reply.
        self.cycle.transport = SimpleNamespace(  # type: ignore[assignment]
            write=self._write,
            is_closing=self.transport.is_closing,
            close=partial(self._close_after, self.cycle),
        )
        if self.scope["http_version"] != "1.0":
            writer = partial(self._write_piece, self.cycle)
            self.scope["extensions"] = {EXTENSION: {"write": writer}}
        self.headers = []  # collects trailers, which are ignored
        self._reading.begin_body(self.loop.time())

    def on_body(self, body: bytes) -> None:
        self._reading.add_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._asks_upgrade():
            super().on_message_complete()
            self._reading.end_message()

    # Requests and replies

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._all.place(self, EvictionClass.ANSWERED)
        if not self._all.has_room() and not cycle.scope["path"].startswith("/health"):
            app = too_many_connections
            self._all.reports.count(ConnectionEnd.REFUSED)
        if cycle.scope["http_version"] == "1.0":
            app = partial(_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, partial(_may_break_off, app, cycle))

    def on_response_complete(self) -> None:
        """Start the next request. Replaces uvicorn's version, which sets a timer for each idle
        connection; here `check` closes idle connections."""
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

    def _write(self, data: bytes) -> None:
        self._largest = max(self._largest, len(data)) if self.unsent() else len(data)
        self.transport.write(data)

    def _write_piece(self, cycle: RequestResponseCycle, piece: bytes) -> bool:
        """Write a piece of a cycle's chunked body. Bound to a cycle, this is the cycle's
        `BodyWriter`."""
        if cycle.disconnected or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return not self.flow.write_paused

    def _close_after(self, cycle: RequestResponseCycle) -> None:
        """Close the connection, because the reply of this cycle was its last. The client may still
        be sending the body."""
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
            if self.pipeline:  # ahead of its turn; stop reading from the client
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
                message = f"this is not an HTTP/1.1 request: {error}"
                if isinstance(error.__context__, httptools.HttpParserInvalidURLError):
                    message = not_a_path(self.url)
                refusal = ApiError(400, "invalid_request_error", message)
                self._refuse(refusal, ConnectionEnd.NOT_HTTP)
                return
        if self._reading.is_too_large(len(piece)):
            self._refuse(headers_too_large(), ConnectionEnd.TOO_LARGE)

    def _asks_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _without_upgrade(self) -> bytes:
        """Replace the parser of an upgrade request, because the old parser would treat the body as
        data of another protocol. Returns the head for the new parser, without the upgrade headers;
        empty for other requests."""
        if not self._asks_upgrade():
            return b""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"".join(lines) + b"\r\n"

    # Deadlines

    def _check_body(self, now: float) -> None:
        timeout, paused = self._settings.slow_sender_timeout, self.flow.read_paused
        answered = self._running is None
        if self._reading.is_body_slow(now, timeout, answered=answered, paused=paused):
            self._refuse(too_slow("the body", timeout), ConnectionEnd.SLOW_BODY)

    def _check_head(self, waited: float) -> None:
        timeout = self._settings.slow_sender_timeout
        if self._reading.state is ReadState.HEAD:
            if waited > timeout:
                self._refuse(too_slow("the headers", timeout), ConnectionEnd.SLOW_HEAD)
            return
        # Send no answer: browsers open connections in advance, and would mistake it for the answer
        # to a later request.
        end = ConnectionEnd.IDLE if self._served else ConnectionEnd.SILENT
        if waited > (self._settings.keep_alive_timeout if self._served else timeout):
            self._all.reports.count(end)
            self.transport.close()

    def _abort_unless_reading(self, acknowledged: int) -> None:
        """If the client has read more than `acknowledged` bytes, check again later; otherwise
        abort."""
        if self not in self.connections:
            return  # the connection was lost in the meantime
        info = tcp_info(self.transport)
        in_time = self.loop.time() < self._all.reply_deadline
        if info is not None and info.acknowledged > acknowledged and self.unsent() and in_time:
            self.loop.call_later(SHUTDOWN_SECONDS, self._abort_unless_reading, info.acknowledged)
        else:
            self.transport.abort()

    # Refusals

    def _refuse(self, error: ApiError, end: ConnectionEnd | None = None) -> None:
        """Answer the incoming request with an error when it is its turn. Later requests are not
        answered."""
        if end is not None:
            self._all.reports.count(end)
        self._held.clear()
        if self._reading.state is ReadState.BODY:
            if self.cycle.response_complete:
                self._linger()
                return
            self._drop(self.cycle)
        self._reading.stop()
        self._refusal = error
        if self._running is None:
            self._answer(error)

    def _drop(self, cycle: RequestResponseCycle) -> None:
        """Drop a request whose body will stay incomplete."""
        if cycle is not self._running:  # it waits for its turn
            self.pipeline.popleft()
        elif cycle.response_started:
            cycle.keep_alive = False
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self._running = None

    def _answer(self, error: ApiError) -> None:
        """Write a refusal. The connection is closed after the client has had time to read it."""
        self.transport.write(whole_reply(error, self.server_state.default_headers))
        self._linger()

    def _linger(self) -> None:
        """Stop writing, and discard further bytes from the client."""
        if self.transport.is_closing():
            return
        self._reading.stop()
        self._linger_until = self.loop.time() + LINGER_SECONDS
        self.transport.write_eof()
        self.flow.resume_reading()


async def _may_break_off(
    app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Any
) -> None:
    """Run `app`, and close the connection if the reply is incomplete. The application has logged
    why; uvicorn would log an error as well."""
    await app(scope, receive, send)
    if cycle.response_started and not cycle.response_complete and not cycle.disconnected:
        cycle.disconnected = True
        cycle.transport.close()


async def _without_chunks(
    app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Any
) -> None:
    """Run `app` for a client of HTTP/1.0, to which no chunks may be sent (RFC 9112, 6.1)."""
    unknown_length = False

    async def send_plain(message: Any) -> None:
        nonlocal unknown_length
        if message["type"] == "http.response.start":
            unknown_length = all(name != b"content-length" for name, _ in message["headers"])
            if unknown_length:
                cycle.chunked_encoding = False
        elif unknown_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_plain)
