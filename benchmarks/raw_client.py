"""RawClient: reads streams over plain HTTP, and counts their tokens without parsing them fully.

`AsyncClient` parses each chunk into dataclasses, which takes Python longer than the server takes to
write it. If both run on the same processors, that slows down what is measured. Here httptools,
whose parser is in C, parses the reply, and a callback counts the tokens of each event as soon as
the event arrives: no task wakes before the end of a stream. Errors have the same names as with
`AsyncClient`.

A `Dialect` defines the requests and events of one kind of server; `NATIVE` is the dialect of
/generate. A stream of any dialect ends in `[DONE]`.

TLS, proxies and retries are not supported. For a server on another machine, use `AsyncClient`,
which then does not compete with the server for processors.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import orjson

from benchmarks.streams import Arrived, StreamFailed, fields
from logitd.service.client import errors
from logitd.service.client.calls import Request
from logitd.service.client.endpoints import stream
from logitd.service.client.errors import (
    APIConnectionError,
    LogitdError,
    MalformedReplyError,
    StreamError,
)
from logitd.service.client.streaming import END, EventDecoder
from logitd.service.client.transport import settings_of

SILENT_SECONDS = 600.0
"""A stream has failed if no event arrives for this many seconds."""

Counter = Callable[[Any], int]
"""Returns the number of tokens in an event of a stream, given the event's parsed JSON. It is called
for each event, in order. Raises StreamFailed for an error that the server reports, and LookupError,
TypeError, ValueError or AttributeError for an event that cannot be parsed."""


class Dialect(Protocol):
    """Request format of one kind of server."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Additional header fields of each request."""

    def request(self, prompt: Sequence[int], tokens: int, seed: int) -> Request:
        """Return a body that requests exactly `tokens` tokens after a prompt."""

    def counter(self, prompt: Sequence[int]) -> Counter:
        """Return a counter of the tokens in one reply to this prompt."""


class _Native:
    """The dialect of logitd's /generate."""

    headers: Mapping[str, str] = {}

    def request(self, prompt: Sequence[int], tokens: int, seed: int) -> Request:
        return stream(prompt, **fields(tokens, seed))

    def counter(self, prompt: Sequence[int]) -> Counter:
        return _count_native


def _count_native(event: Any) -> int:
    if "error" in event:
        error = errors.from_event(event["error"], "")
        raise StreamFailed(type(error).__name__, error.message)
    return sum(len(choice["token_ids"]) for choice in event["choices"])


NATIVE: Dialect = _Native()


class RawClient:
    """Sends requests to the server at an `http://` URL, with the API key in LOGITD_API_KEY if it is
    set. It is an `Ask` of `benchmarks/streams.py`. Use it in a single event loop, and `close` it at
    the end."""

    def __init__(self, url: str, dialect: Dialect = NATIVE) -> None:
        self._settings = settings_of(url)
        self._dialect = dialect
        split = urlsplit(self._settings.base_url)
        if split.scheme != "http" or split.hostname is None:
            raise ValueError(f"{url} is not an http:// URL; use AsyncClient for others")
        self._host, self._port = split.hostname, split.port or 80
        self._authority, self._path = split.netloc, split.path
        self._idle: list[_Connection] = []

    async def __call__(
        self, prompt: Sequence[int], tokens: int, seed: int, arrived: Arrived
    ) -> None:
        """Request a stream, and return when it ends. Raises StreamFailed."""
        connection = None
        try:
            connection = await self._connected()
            reply = _Reply(self._dialect.counter(prompt), arrived)
            connection.ask(self._written(prompt, tokens, seed), reply)
            await reply.ended
        except LogitdError as error:
            raise StreamFailed(type(error).__name__, error.message) from error
        finally:
            if connection is not None:
                if connection.usable:
                    self._idle.append(connection)
                else:
                    connection.close()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connected(self) -> "_Connection":
        """A free connection: one that is already open, or else a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        except OSError as error:
            url = self._settings.base_url
            raise APIConnectionError(f"no connection to {url}: {error}", "") from error
        return connection

    def _written(self, prompt: Sequence[int], tokens: int, seed: int) -> bytes:
        """The bytes of the request."""
        request = self._dialect.request(prompt, tokens, seed)
        body = request.body
        assert body is not None
        headers = self._settings.headers(request, uuid.uuid4().hex)
        lines = [
            f"{request.method} {self._path}{request.path} HTTP/1.1",
            f"Host: {self._authority}",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in {**headers, **self._dialect.headers}.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class _Reply:
    """One reply that is being received. httptools calls the methods that begin with `on_`."""

    def __init__(self, count: Counter, arrived: Arrived) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.complete = False
        self.heard = True  # since `silent` was last read
        self._count, self._arrived = count, arrived
        self._headers: dict[str, str] = {}
        self._events = EventDecoder()
        self._tokens = 0
        self._done = False  # its last event has arrived
        self._refusal = bytearray()

    def lost(self, why: str) -> None:
        """End the stream with an error that says why, unless the reply is complete."""
        if not self.complete:
            message = f"the stream broke off after {self._tokens} tokens: {why}"
            self._fail(StreamError(message, self._tokens, self._request_id))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode(errors="replace")

    def on_body(self, piece: bytes) -> None:
        if self.parser.get_status_code() != 200:
            self._refusal += piece
            return
        for data in self._events.push(piece):
            if data == END:
                self._done = True
            elif not self.ended.done():
                self._take(data)

    def on_message_complete(self) -> None:
        self.complete = True
        status = self.parser.get_status_code()
        if status != 200:
            refused = errors.from_reply(status, self._headers, self._refusal, self._request_id)
            self._fail(refused)
        elif not self._done:
            message = f"the stream ended without its last event after {self._tokens} tokens"
            self._fail(StreamError(message, self._tokens, self._request_id))
        elif not self.ended.done():
            self.ended.set_result(None)

    @property
    def _request_id(self) -> str:
        return self._headers.get("x-request-id", "")

    def _fail(self, error: Exception) -> None:
        """End the stream with this error, unless it has already ended."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def _take(self, data: bytes) -> None:
        """Parse one event and count its tokens."""
        try:
            count = self._count(orjson.loads(data))
        except StreamFailed as failed:
            self._fail(failed)
        except (ValueError, LookupError, TypeError, AttributeError):
            said = data[:200].decode(errors="replace")
            message = f"an event of the stream has no tokens: {said}"
            self._fail(MalformedReplyError(message, self._request_id))
        else:
            self._tokens += count
            self._arrived(count)


class _Connection(asyncio.Protocol):
    """A connection that carries one reply after another."""

    def __init__(self) -> None:
        self._reply: _Reply | None = None
        self._transport: asyncio.Transport
        self._watch: asyncio.TimerHandle | None = None
        self._open = False

    @property
    def usable(self) -> bool:
        """True if no request is in flight."""
        reply = self._reply
        return self._open and (
            reply is None or (reply.complete and reply.parser.should_keep_alive())
        )

    def ask(self, request: bytes, reply: _Reply) -> None:
        """Send a request. What the server returns is passed to `reply`."""
        self._reply = reply
        self._transport.write(request)
        self._watch_silence()

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Cast, because uvloop's transports do not derive from asyncio's.
        self._transport, self._open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None or reply.complete:
            self.close()  # no request waits for this
            return
        try:
            reply.parser.feed_data(data)
        except httptools.HttpParserError as error:
            reply.lost(f"this is not HTTP: {error}")
            self.close()
        reply.heard = True

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        if self._watch is not None:
            self._watch.cancel()
        if self._reply is not None:
            self._reply.lost(str(error or "the connection was closed"))

    def _watch_silence(self) -> None:
        """Check at intervals whether anything has arrived. This is cheaper than a new timeout each
        time data arrives."""
        if self._watch is not None:
            self._watch.cancel()
        if self._reply is not None:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(SILENT_SECONDS, self._look, self._reply)

    def _look(self, reply: _Reply) -> None:
        if reply.complete or reply is not self._reply:
            return
        if reply.heard:
            reply.heard = False
            self._watch_silence()
        else:
            reply.lost(f"nothing arrived for {SILENT_SECONDS:g} s")
            self.close()
