"""Protocol: one HTTP connection, as uvicorn's with bounds on what its client may do.

Added to uvicorn's protocol over httptools: the bytes of a head, of chunk sizes and of trailers are
bounded before they are complete (431); deadlines for head, body, idleness and unread replies (408,
or just an end), looked at by the register's one timer; requests that a client sends ahead are kept
back in its socket until their turn; what the server refuses is answered in turn too; an answer that
comes before the whole body is read by the client before the connection closes; requests to upgrade
are answered as ordinary HTTP.

A client that ends its side after whole requests is answered if it still listens, and its requests
are aborted if it has gone (`listening.py`). Over HTTP/1.0, where nothing may be sent ahead of a
reply, the end of its side is the end, unless the reply has begun.

Not here: how many connections there may be (`register.py`), what requests mean (`service/app/`).
"""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import httptools
import orjson
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from logitd.service.connections.limits import (
    FRAMING_PER_BODY_BYTE,
    MAX_HEADER_BYTES,
    MAX_RAW_HEADER_BYTES,
    MIN_BYTES_PER_SECOND,
)
from logitd.service.connections.listening import Listening
from logitd.service.connections.register import Register, Standing
from logitd.service.connections.tcp import CLOSE_WAIT, RESET, tcp_info
from logitd.service.core.errors import ApiError, unavailable
from logitd.service.core.metrics import ConnectionEnd

PIECE = 16 * 1024
"""Bytes that the parser gets at once: between two pieces it is decided whether to go on."""
LINGER_SECONDS = 2.0
"""A client that is still sending when it is refused has this long to stop and read why: closing at
once would reset the connection, and the answer with it."""
LINGER_BYTES = 2**20
"""What is read of it meanwhile; the rest stays with the client."""
SHUTDOWN_SECONDS = 0.5
"""At shutdown, a connection that takes nothing of its reply for this long is aborted."""


class Awaited(Enum):
    """What has to come next from the client."""

    REQUEST = auto()
    """A first byte."""
    HEAD = auto()
    """The rest of request line and headers."""
    BODY = auto()
    """The rest of the body."""


class ReplyTransport:
    """What a reply is written to. uvicorn closes it behind the last one of a connection."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class Connection(HttpToolsProtocol):
    """One connection. What uvicorn calls `cycle` is a request and its reply."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        register: Register,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._register = register
        self._limits = register.limits
        self._awaited = Awaited.REQUEST
        self._since = self.loop.time()  # when what is awaited began to be
        self._served = False  # a reply was written
        self._running: RequestResponseCycle | None = None  # its reply is not complete
        self._standing: Standing | None = None
        self._held = bytearray()  # received ahead of its turn
        self._refusal: ApiError | None = None
        self._linger_until: float | None = None
        self._throw_away_until = 0  # bytes received
        # Counting of bytes: in this piece, of this message, of all that came.
        self._piece_body = 0
        self._piece_completes = False
        self._unfinished = 0
        self._body_size = 0
        self._received = 0
        self._body_mark = (0.0, 0)  # time and bytes received, from where progress counts
        self._reply_mark: tuple[float, int, int] | None = None  # time, acknowledged, unsent
        self._upgrade = False  # the message asks for another protocol
        self._ended_its_side = False  # the client, after all that was received
        self._listening: Listening | None = None  # it seems so
        self._ending: asyncio.TimerHandle | None = None  # at shutdown

    # What the event loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._register.opened(self)
        if not transport.is_closing():
            self._stand(Standing.WAITS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._register.closed(self)
        if self._ending is not None:
            self._ending.cancel()
        if self._listening is not None:
            self._listening.end()
        self._held.clear()
        self.pipeline.clear()
        if self._running is not None:  # uvicorn tells the latest alone
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._refusal is not None or self._linger_until is not None:  # nothing more is answered
            if self._received > self._throw_away_until:
                self.flow.pause_reading()
            return
        if self._awaited is Awaited.REQUEST:
            self._awaited, self._since = Awaited.HEAD, self.loop.time()
        self._feed(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays: what is being answered came whole, and there is a way to
        find out whether anybody listens. A request that is not whole will never be."""
        self._ended_its_side = True
        if self._awaited is Awaited.BODY:
            self._give_up(self.cycle)
        running = self._running
        if running is None or not self._ask_whether_it_listens():
            return False
        if not self.pipeline and not self._held:
            running.keep_alive = False
        return True

    # What the register calls

    def abort(self) -> None:
        self.transport.abort()

    def unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def check(self, now: float) -> None:
        """End the connection, or answer it, if a deadline has passed."""
        if self._leaves_unread(now):
            self._register.reports.count(ConnectionEnd.UNREAD)
            self.transport.abort()
        elif self._linger_until is not None:
            if self.unsent():  # its time to stop and read begins with the end of the reply
                self._linger_until = now + LINGER_SECONDS
            elif now >= self._linger_until:
                self.transport.abort()
        elif not self.transport.is_closing() and self._refusal is None:
            if self._running is not None and self.flow.read_paused:
                self._look_for_its_end()
            elif self._running is not None and self._listening is not None:
                self._abort_unless_it_can_listen()
            if self._awaited is Awaited.BODY:
                self._check_body(now)
            elif self._running is None:
                self._check_head(now)

    # What uvicorn's server calls

    def shutdown(self) -> None:
        """Refuse what has not been received whole; let go of replies that are not being read."""
        self._end_soon(acknowledged=0)
        if self._awaited is Awaited.BODY:
            self._refuse(unavailable("the server is shutting down"), None)
        elif self._running is None:
            self.transport.close()
        else:
            self._running.keep_alive = False
            self.pipeline.clear()

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._upgrade = False
        self._awaited, self._since = Awaited.HEAD, self.loop.time()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrade = True
            return
        super().on_headers_complete()
        end = partial(self._end_reply, self.cycle)
        self.cycle.transport = ReplyTransport(self.transport, end)  # type: ignore[assignment]
        self.headers = []  # trailers come too late to mean anything
        self._piece_completes = True
        self._body_size = 0
        self._awaited, self._body_mark = Awaited.BODY, (self.loop.time(), self._received)

    def on_body(self, body: bytes) -> None:
        self._piece_body += len(body)
        self._body_size += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        super().on_message_complete()
        self._piece_completes = True
        self._awaited = Awaited.REQUEST

    # Requests and replies

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._stand(Standing.ANSWERED)
        if not self._register.has_room() and not cycle.scope["path"].startswith("/health"):
            app = _full
            self._register.reports.count(ConnectionEnd.REFUSED)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """As uvicorn's, with its timer of idleness left to the register."""
        self.server_state.total_requests += 1
        self._running = None
        self._served = True
        self._since = self.loop.time()
        self._body_mark = (self._since, self._received)
        if self.transport.is_closing() or self._linger_until is not None:
            return
        self._stand(Standing.WAITS)
        self._take_turn()

    def _end_reply(self, cycle: RequestResponseCycle) -> None:
        """Close behind a reply that is the last. The client may still be sending the body that was
        not waited for."""
        if cycle is self.cycle and self._awaited is Awaited.BODY and cycle.response_complete:
            self._throw_away_until = self._received + LINGER_BYTES
            self._linger()
        else:
            self.transport.close()

    def _take_turn(self) -> None:
        """Go on with what came while a reply was under way."""
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if not self.pipeline and self._held:
            held = bytes(self._held)
            self._held.clear()
            self._feed(held)
        if self._running is None and self._refusal is not None:
            self._end_with(self._refusal)
        elif self._ended_its_side and self._running is None and not self._held:
            self.transport.close()
        elif not self._held and not self.pipeline:
            self.flow.resume_reading()

    def _stand(self, standing: Standing) -> None:
        if self._standing is not standing:
            self._standing = standing
            self._register.place(self, standing)

    # Bytes

    def _hold(self, data: bytes) -> None:
        """Keep what is ahead of its turn; the rest stays with the client."""
        self._held += data
        self.flow.pause_reading()

    def _feed(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            if self._refusal is not None:
                return
            if self.pipeline:
                self._hold(data[start:])
                return
            self._parse(data[start : start + PIECE])
        if self._running is None:
            pass
        elif self._awaited is Awaited.BODY:
            self._stand(Standing.SENDS)
        else:
            self._stand(Standing.ANSWERED)

    def _parse(self, piece: bytes) -> None:
        self._piece_body, self._piece_completes = 0, False
        rest = piece
        while rest:
            try:
                self.parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as stopped:
                rest = self._without_upgrade() + rest[stopped.args[0] :]
            except httptools.HttpParserError as error:
                message = f"this is not an HTTP/1.1 request: {error}"
                refusal = ApiError(400, "invalid_request_error", message)
                self._refuse(refusal, ConnectionEnd.NOT_HTTP)
                return
        self._count(len(piece))

    def _without_upgrade(self) -> bytes:
        """The head of a request to upgrade, as that of a request which does not ask for it, for a
        new parser: the old one takes the body for another protocol."""
        if not self._upgrade:
            return b""
        line = self.parser.get_method() + b" " + self.url
        line += b" HTTP/" + self.parser.get_http_version().encode() + b"\r\n"
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return line + b"".join(b"%s: %s\r\n" % header for header in kept) + b"\r\n"

    def _count(self, size: int) -> None:
        """Bound what has come without completing a head, or a chunk's size, or trailers. A piece
        that completes one counts as nothing, so the bound is exact to a piece."""
        if self._piece_completes:
            self._unfinished = 0
        else:
            self._unfinished += size - self._piece_body
        allowed = MAX_RAW_HEADER_BYTES
        if self._awaited is Awaited.BODY:
            allowed += FRAMING_PER_BODY_BYTE * self._body_size
        if self._unfinished > allowed:
            self._refuse(headers_too_large(), ConnectionEnd.TOO_LARGE)

    # Deadlines

    def _check_head(self, now: float) -> None:
        if self.unsent():  # the reply before is still being read
            self._since = now
        elif self._awaited is Awaited.HEAD:
            if now - self._since > self._limits.slow_sender_timeout:
                self._refuse(self._too_slow("the headers"), ConnectionEnd.SLOW_HEAD)
        elif self._served:
            if now - self._since > self._limits.keep_alive_timeout:
                self._register.reports.count(ConnectionEnd.IDLE)
                self.transport.close()
        elif now - self._since > self._limits.slow_sender_timeout:
            # Browsers open connections ahead and show an answer to nothing as that to something.
            self._register.reports.count(ConnectionEnd.SILENT)
            self.transport.close()

    def _check_body(self, now: float) -> None:
        """A body has to progress; what comes after its reply has to end."""
        timeout = self._limits.slow_sender_timeout
        since, received = self._body_mark
        enough = self._received - received >= timeout * MIN_BYTES_PER_SECOND
        if self._running is not None and (enough or self.flow.read_paused):
            self._body_mark = (now, self._received)
        elif now - since > timeout:
            self._refuse(self._too_slow("the body"), ConnectionEnd.SLOW_BODY)

    def _leaves_unread(self, now: float) -> bool:
        """Whether too little of a reply was taken for too long. Streams have a timeout of their
        own (`service/api/responses/sse.py`), which comes first."""
        unsent = self.unsent()
        if not unsent:
            self._reply_mark = None
            return False
        timeout = self._limits.slow_reader_timeout
        info = tcp_info(self.transport)
        if self._reply_mark is None:
            progress = True
        elif info is None:  # no count: only a reader that takes nothing at all is seen
            progress = unsent != self._reply_mark[2]
        else:
            taken = info.acknowledged - self._reply_mark[1]
            progress = taken >= timeout * MIN_BYTES_PER_SECOND
        if progress or self._reply_mark is None:
            self._reply_mark = (now, 0 if info is None else info.acknowledged, unsent)
            return False
        return now - self._reply_mark[0] > timeout * (1 if self._running is None else 2)

    def _look_for_its_end(self) -> None:
        """While nothing is read, the end of a connection does not show by itself."""
        info = tcp_info(self.transport)
        if info is not None and info.state == RESET:
            self.transport.abort()
        elif info is not None and info.state == CLOSE_WAIT:
            self._abort_unless_it_can_listen()

    def _abort_unless_it_can_listen(self) -> None:
        if not self._ask_whether_it_listens():
            self.transport.abort()

    def _ask_whether_it_listens(self) -> bool:
        """Ask a client that ended its side, if there is a way to: send something, which is the
        reply itself once that has begun."""
        assert self._running is not None
        begun = self._running.response_started
        if not begun and self._running.scope["http_version"] == "1.0":
            return False
        if self._listening is None:
            self._listening = Listening(self.transport, self.loop)
        self._listening.ask(interim=not begun)
        return True

    def _abort_unless_reading(self, acknowledged: int) -> None:
        info = tcp_info(self.transport)
        reading = info is not None and info.acknowledged > acknowledged and self.unsent() > 0
        if info is not None and reading and self.loop.time() < self._register.reply_deadline:
            self._end_soon(info.acknowledged)
        else:
            self.transport.abort()

    def _end_soon(self, acknowledged: int) -> None:
        """Look in a moment whether more than this was taken of the reply."""
        self._ending = self.loop.call_later(
            SHUTDOWN_SECONDS, self._abort_unless_reading, acknowledged
        )

    def _too_slow(self, what: str) -> ApiError:
        return ApiError(
            408,
            "timeout_error",
            f"{what} did not come in time: the headers may take "
            f"{self._limits.slow_sender_timeout:g} s, and the body has to come with "
            f"{MIN_BYTES_PER_SECOND} bytes/s; send faster, or raise --slow-sender-timeout",
        )

    # Refusals

    def _refuse(self, error: ApiError, end: ConnectionEnd | None) -> None:
        """Answer what is awaited with an error, in its turn, and nothing after it."""
        if end is not None:
            self._register.reports.count(end)
        self._refusal = error
        self._throw_away_until = self._received + LINGER_BYTES
        self._held.clear()
        if self._awaited is Awaited.BODY:
            self._give_up(self.cycle)
        if self._running is None:
            self._end_with(error)

    def _give_up(self, cycle: RequestResponseCycle) -> None:
        """Let a request go whose body will not be whole."""
        if cycle is not self._running:  # answered already, or it waits for its turn
            self.pipeline = type(self.pipeline)(p for p in self.pipeline if p[0] is not cycle)
        elif cycle.response_started:
            cycle.keep_alive = False
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self._running = None

    def _end_with(self, error: ApiError) -> None:
        """Write the answer to what is refused, and close when the client has had time to read."""
        if self.transport.is_closing() or self._linger_until is not None:
            return
        if self._awaited is not Awaited.BODY or not self.cycle.response_complete:
            self.transport.write(_reply(error, self.server_state.default_headers))
        self._linger()

    def _linger(self) -> None:
        """Nothing more is written, and what the client still sends is thrown away."""
        self._linger_until = self.loop.time() + LINGER_SECONDS
        self.transport.write_eof()
        self.flow.resume_reading()


def headers_too_large() -> ApiError:
    """The answer where request line and headers have more bytes than they may."""
    message = f"the address and the headers are larger than {MAX_HEADER_BYTES} bytes together"
    return ApiError(431, "invalid_request_error", message)


def _reply(error: ApiError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A whole reply, for a client that has not sent a whole request."""
    body = orjson.dumps(error.body())
    lines = [
        STATUS_LINE[error.status].removesuffix(b"\r\n"),
        *(name + b": " + value for name, value in headers),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    if error.retry_after is not None:
        lines.append(b"retry-after: %d" % error.retry_after)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def _full(scope: Any, receive: Any, send: Any) -> None:
    """What an application would be where there are too many connections."""
    error = unavailable("there are too many connections; close those that are not needed")
    response = error.response()
    response.headers["Connection"] = "close"
    await response(scope, receive, send)
