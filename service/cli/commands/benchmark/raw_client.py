"""RawClient: streams of /generate over plain HTTP, whose tokens it counts and does not read.

`AsyncClient` parses each chunk into dataclasses, which takes Python longer than the server takes to
write it. Where both run on the same processors, that slows what is measured. Here httptools, whose
parser is C, parses the reply, and of an event we count the ids. Requests and errors are those of
`AsyncClient`.

Does not cover TLS, proxies and retries. A server on another machine is asked by `AsyncClient`,
whose time is not the server's.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

from service.cli.commands.benchmark.load import StreamFailed, fields
from service.client import errors
from service.client.calls import stream
from service.client.errors import APIConnectionError, LogitdError, MalformedReplyError, StreamError
from service.client.streaming import END, EventDecoder
from service.client.transport import settings_of

SILENT_SECONDS = 600.0
"""A stream that brings nothing for as long has failed."""


class RawClient:
    """Asks the server at a `http://` URL, with the API key of LOGITD_API_KEY if there is one. An
    `Ask` of `service/cli/commands/benchmark/load.py`. Of one event loop; `close` ends it."""

    def __init__(self, url: str) -> None:
        self._settings = settings_of(url, None, None, 0, None)
        split = urlsplit(self._settings.base_url)
        if split.scheme != "http" or split.hostname is None:
            raise ValueError(f"{url} is not an http:// URL; use AsyncClient for others")
        self._host, self._port = split.hostname, split.port or 80
        self._authority, self._path = split.netloc, split.path
        self._idle: list[_Connection] = []

    async def __call__(
        self, prompt: Sequence[int], tokens: int, seed: int
    ) -> AsyncGenerator[int, None]:
        """How many tokens each chunk brings, as it comes. Raises StreamFailed."""
        connection = None
        try:
            connection = await self._connected()
            reply = connection.ask(self._written(prompt, tokens, seed))
            async for count in reply.counts():
                yield count
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
        """A connection that nobody uses: one that was used before, if there is one."""
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
        """The request as it is sent."""
        request = stream(prompt, fields(tokens, seed))
        assert request.body is not None
        headers = self._settings.headers(request, uuid.uuid4().hex)
        lines = [
            f"{request.method} {self._path}{request.path} HTTP/1.1",
            f"Host: {self._authority}",
            f"Content-Length: {len(request.body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + request.body


class _Reply:
    """One reply as it comes. The methods that begin with `on_` are called by httptools."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.complete = False
        self.heard = True  # since `silent` was last asked
        self._headers: dict[str, str] = {}
        self._events = EventDecoder()
        self._counts: deque[int] = deque()
        self._tokens = 0
        self._ended = False
        self._refusal = bytearray()
        self._failure: LogitdError | None = None
        self._waiting: asyncio.Future[None] | None = None

    async def counts(self) -> AsyncGenerator[int, None]:
        """Tokens of each chunk. Raises what failed, behind all that came before."""
        while True:
            while self._counts:
                yield self._counts.popleft()
            if self._failure is not None:
                raise self._failure
            if self.complete:
                return
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def wake(self) -> None:
        """Let the reader see what has come."""
        self.heard = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def fail(self, error: LogitdError) -> None:
        """Nothing more will come, or nothing more counts."""
        self._failure = self._failure or error

    def lost(self, why: str) -> None:
        """The connection has ended."""
        if not self.complete:
            message = f"the stream broke off after {self._tokens} tokens: {why}"
            self.fail(StreamError(message, self._tokens, self._request_id))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode(errors="replace")

    def on_body(self, piece: bytes) -> None:
        if self.parser.get_status_code() != 200:
            self._refusal += piece
            return
        for data in self._events.push(piece):
            if data == END:
                self._ended = True
            elif self._failure is None:
                self._count(data)

    def on_message_complete(self) -> None:
        self.complete = True
        status = self.parser.get_status_code()
        if status != 200:
            refused = errors.from_reply(status, self._headers, self._refusal, self._request_id)
            self.fail(refused)
        elif not self._ended:
            message = f"the stream ended without its end after {self._tokens} tokens"
            self.fail(StreamError(message, self._tokens, self._request_id))

    @property
    def _request_id(self) -> str:
        return self._headers.get("x-request-id", "")

    def _count(self, data: bytes) -> None:
        """Take in an event."""
        try:
            event: Any = orjson.loads(data)
            if "error" in event:
                self.fail(errors.from_event(event["error"], self._request_id))
                return
            count = sum(len(choice["token_ids"]) for choice in event["choices"])
        except (ValueError, LookupError, TypeError):
            message = "an event of the stream cannot be read: it has no choices with token ids"
            self.fail(MalformedReplyError(message, self._request_id))
            return
        self._tokens += count
        self._counts.append(count)


class _Connection(asyncio.Protocol):
    """A connection that carries one reply after the other."""

    def __init__(self) -> None:
        self._reply: _Reply | None = None
        self._transport: asyncio.Transport
        self._watch: asyncio.TimerHandle | None = None
        self._open = False

    @property
    def usable(self) -> bool:
        """Whether another request can be sent: nothing is on its way any more."""
        reply = self._reply
        return self._open and (
            reply is None or (reply.complete and reply.parser.should_keep_alive())
        )

    def ask(self, request: bytes) -> _Reply:
        reply = self._reply = _Reply()
        self._transport.write(request)
        self._watch_silence()
        return reply

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # By what it can do, not by its class: uvloop's have none of asyncio's above them.
        self._transport, self._open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None or reply.complete:
            self.close()  # nobody asked for this
            return
        try:
            reply.parser.feed_data(data)
        except httptools.HttpParserError as error:
            reply.lost(f"this is not HTTP: {error}")
            self.close()
        reply.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        if self._watch is not None:
            self._watch.cancel()
        if self._reply is not None:
            self._reply.lost(str(error or "the connection was closed"))
            self._reply.wake()

    def _watch_silence(self) -> None:
        """Look again and again whether anything came: cheaper than a timeout for every piece."""
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
            reply.lost(f"nothing came for {SILENT_SECONDS:g} s")
            self.close()
