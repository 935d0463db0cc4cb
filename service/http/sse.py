"""Server-sent events: streamed replies that end their request when the client leaves.

An event is `data: {json}` and a blank line, with LF line ends. After every 15 s of silence, the
server sends a comment, so that proxies do not close the connection. An error after the first byte
is sent as `data: {"error": ...}`. The last event is `data: [DONE]`.

Unlike Starlette's StreamingResponse, `StreamedResponse` stops when the client leaves even if the
generator never waits, and ends a reply that the client does not read.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from logitd.service.body_writer import MIN_BYTES_PER_SECOND
from logitd.service.errors import ERRORS, EXPECTED, as_api_error
from logitd.service.models.context import disconnected

logger = logging.getLogger("logitd.http")

MEDIA_TYPE = "text/event-stream"
RESPONSES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {
        "content": {
            MEDIA_TYPE: {
                "schema": {
                    "type": "object",
                    "description": "An event, with `stream`. Comments (`: keep-alive`) may "
                    "come between events.",
                    "properties": {
                        "data": {
                            "type": "string",
                            "description": "A chunk as JSON on one line; an error after the first "
                            'byte is `{"error": ...}`; the last event is `[DONE]`.',
                        }
                    },
                    "required": ["data"],
                }
            }
        }
    },
}
"""OpenAPI responses of an endpoint that can stream its reply."""
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
UNICODE_BREAKS = tuple(
    (mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\u0085\u2028\u2029"
)


def event(data: Any) -> bytes:
    """An event on one line. orjson escapes ASCII line breaks; Unicode line breaks are escaped here,
    because some clients split lines at those too."""
    line = orjson.dumps(data)
    if not line.isascii():
        for raw, escaped in UNICODE_BREAKS:
            line = line.replace(raw, escaped)
    return b"data: " + line + b"\n\n"


async def with_keep_alive(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces, and a comment after each KEEP_ALIVE_SECONDS without a piece."""
    upcoming = asyncio.ensure_future(anext(pieces, None))
    try:
        while True:
            done, _ = await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_SECONDS)
            if not done:
                yield KEEP_ALIVE
                continue
            if (piece := upcoming.result()) is None:
                return
            yield piece
            upcoming = asyncio.ensure_future(anext(pieces, None))
    finally:
        upcoming.cancel()


class StreamedResponse(Response):
    """Writes each piece of an async iterator as soon as the iterator yields it.

    on_end         is called exactly once: before the end of the body is sent, when the client has
                   left, or when the client has not read a piece in `write_timeout` seconds and
                   the time that it takes at MIN_BYTES_PER_SECOND. It must stop the source of the
                   iterator
    waits          True if the iterator waits before each piece, so that other tasks run in between
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        *,
        on_end: Callable[[], None],
        write_timeout: float,
        media_type: str,
        headers: Mapping[str, str] | None = None,
        waits: bool = False,
    ) -> None:
        self._pieces = pieces
        self._waits = waits
        self._sending_until: float | None = None
        self._unread = False
        self._watch: asyncio.TimerHandle | None = None
        self._ended = ExitStack()
        self._ended.callback(on_end)
        self._write_timeout = write_timeout
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers(
            {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        )
        del self.headers["content-length"]  # unknown, because the body is chunked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        self._look(writing)
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if self._unread:
                logger.warning("a client left a reply unread for %g s", self._write_timeout)
            elif writing.done():
                writing.result()
        except EXPECTED as error:
            # Too late for an error status. The client sees that the body is incomplete.
            logger.warning("a reply was broken off: %s", as_api_error(error).message)
        finally:
            self._ended.close()
            if self._watch is not None:
                self._watch.cancel()
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        more = True
        async for piece in self._pieces:
            # A client may send its next request when it has read DONE.
            more = self.media_type != MEDIA_TYPE or not piece.endswith(DONE)
            await self._send_body(send, piece, more=more)
            if not self._waits:
                # If `send` never suspended, a disconnect would go unnoticed.
                await asyncio.sleep(0)
        if more:
            await self._send_body(send, b"", more=False)

    async def _send_body(self, send: Send, piece: bytes, *, more: bool) -> None:
        if not more:
            self._ended.close()
        allowed = self._write_timeout + len(piece) / MIN_BYTES_PER_SECOND
        self._sending_until = asyncio.get_running_loop().time() + allowed
        await send({"type": "http.response.body", "body": piece, "more_body": more})
        self._sending_until = None

    def _look(self, writing: asyncio.Future[None]) -> None:
        """End the reply if the client has not read a piece in time. Otherwise check again at the
        earliest time at which the timeout can expire. Setting a timer for each piece would take as
        long as writing the piece."""
        loop = asyncio.get_running_loop()
        now, until = loop.time(), self._sending_until
        if until is None:
            until = now + self._write_timeout
        if now >= until:
            self._unread = True
            writing.cancel()
        else:
            self._watch = loop.call_at(until, self._look, writing)
