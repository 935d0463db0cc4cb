"""Streaming: from the bytes of a stream to chunks, and to the generation that they add up to.

`StreamState` parses what has arrived; `StreamReader` receives it for `Stream` and `AsyncStream`.
Events end lines in LF, or in CRLF behind some proxies; comments are skipped.
"""

import json
from collections import deque
from dataclasses import dataclass, replace

import httpx

from logitd.service.client import errors
from logitd.service.client.arrays import Chunk
from logitd.service.client.calls import with_request_id
from logitd.service.client.errors import LogitdError, MalformedReplyError, StreamError
from logitd.service.client.reading import WrongShape, read
from logitd.service.client.results import Choice, Generation, ScoredPrompt, Timings, Token, Usage
from logitd.service.client.transport import Exchange
from logitd.service.client.wire import Reply, Wire, begin

END = b"[DONE]"


class EventDecoder:
    """The data of server-sent events, from pieces cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""  # of a line
        self._data: list[bytes] = []  # of an event

    def push(self, piece: bytes) -> list[bytes]:
        """The events that the piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            name, _, value = line.removesuffix(b"\r").partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not name and not value and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


@dataclass(frozen=True, slots=True)
class _Tail:
    """Members that the last chunk alone has."""

    usage: Usage
    seed: int | None
    timings: Timings


class StreamState:
    """The received part of a stream. `ended` is True after the server's last event."""

    def __init__(self) -> None:
        self.request_id = ""
        self.ended = False
        self._decoder = EventDecoder()
        self._events: deque[bytes] = deque()
        self._choices: dict[int, list[Choice]] = {}  # the pieces of each
        self._prompts: dict[int, list[Token]] = {}
        self._last: Chunk | None = None
        self._tail: _Tail | None = None

    def push(self, piece: bytes) -> None:
        """Add received bytes."""
        self._events += self._decoder.push(piece)

    def next(self) -> Chunk | None:
        """The next chunk with something new; None if more bytes are needed, or after the end.
        Raises the error of an error event."""
        while self._events and not self.ended:
            data = self._events.popleft()
            if data == END:
                self._end()
            else:
                chunk = self._read(data)
                if chunk.choices or chunk.prompts:
                    return chunk
        return None

    def cut(self) -> StreamError:
        """The error of a stream that stops before its end."""
        message = f"the stream stopped before its end, after {self.tokens} tokens"
        return StreamError(message, self.tokens, self.request_id)

    @property
    def text(self) -> str:
        """The first choice's text so far."""
        return "".join(piece.text for piece in self._choices.get(0, ()))

    @property
    def tokens(self) -> int:
        """Number of tokens so far, of all choices."""
        return sum(len(piece.token_ids) for pieces in self._choices.values() for piece in pieces)

    @property
    def tail(self) -> _Tail:
        """Usage, seed and timings. Raises LogitdError before the end."""
        if self._tail is None:
            raise LogitdError(
                f"the stream has not ended, after {self.tokens} tokens: usage, seed and timings "
                "come at its end",
                self.request_id,
            )
        return self._tail

    def result(self) -> Generation:
        """The reply that a request without streaming has. Raises StreamError before the end."""
        last, tail = self._last, self._tail
        if not self.ended or last is None or tail is None:
            raise StreamError(
                f"the stream was left after {self.tokens} tokens, so its result is incomplete",
                self.tokens,
                self.request_id,
            )
        prompts = tuple(
            ScoredPrompt(index, tuple(tokens)) for index, tokens in sorted(self._prompts.items())
        )
        return Generation(
            id=last.id,
            created=last.created,
            model=last.model,
            checkpoint=last.checkpoint,
            choices=tuple(_joined(pieces) for _, pieces in sorted(self._choices.items())),
            usage=tail.usage,
            seed=tail.seed,
            timings=tail.timings,
            request_id=self.request_id,
            prompts=prompts or None,
        )

    def _read(self, data: bytes) -> Chunk:
        """Parse an event and keep its pieces."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._malformed("it is not JSON") from error
        if isinstance(value, dict) and "error" in value:
            raise errors.from_event(value["error"], self.request_id)
        try:
            chunk: Chunk = read(Chunk, with_request_id(value, self.request_id))
            if "usage" in value:
                self._tail = read(_Tail, value)
        except WrongShape as error:
            raise self._malformed(str(error)) from error
        self._last = chunk
        for piece in chunk.choices:
            self._choices.setdefault(piece.index, []).append(piece)
        for prompt in chunk.prompts or ():
            self._prompts.setdefault(prompt.index, []).extend(prompt.tokens)
        return chunk

    def _end(self) -> None:
        self.ended = True
        if self._tail is None or not self._choices:
            raise self._malformed("the last one came before the usage, or before any choice")

    def _malformed(self, reason: str) -> MalformedReplyError:
        message = f"this client cannot read an event of the stream: {reason}"
        return MalformedReplyError(message, self.request_id)


def _joined(pieces: list[Choice]) -> Choice:
    """The choice of these pieces."""
    first = pieces[0]
    ended = next((piece for piece in reversed(pieces) if piece.finish_reason is not None), first)
    with_tokens = [piece.tokens for piece in pieces if piece.tokens is not None]
    return replace(
        first,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=ended.finish_reason,
        stop_reason=ended.stop_reason,
        tokens=tuple(token for tokens in with_tokens for token in tokens) if with_tokens else None,
    )


class StreamReader:
    """A stream that is being received."""

    def __init__(self, wire: Wire, exchange: Exchange) -> None:
        self.state = StreamState()
        self.exchange = exchange
        self._wire = wire
        self._reply: Reply | None = None
        self._closed = False

    async def open(self) -> None:
        """Send the request, unless it was sent or the stream is closed."""
        if self._reply is None and not self._closed:
            self._reply = await begin(self._wire, self.exchange)
            self.state.request_id = self.exchange.request_id

    async def next(self) -> Chunk | None:
        """The next chunk; None after the end. An error closes the stream."""
        try:
            while not self._closed:
                if (chunk := self.state.next()) is not None:
                    return chunk
                await self._receive()
        except BaseException:
            await self.close()
            raise
        return None

    async def result(self) -> Generation:
        """The whole generation, once the rest has been read."""
        while await self.next() is not None:
            continue
        return self.state.result()

    async def close(self) -> None:
        self._closed = True
        if self._reply is not None:
            await self._reply.close()

    async def _receive(self) -> None:
        """Read the next piece. httpx reuses the connection only if the last byte was read, so close
        after it."""
        await self.open()
        assert self._reply is not None
        try:
            piece = await self._reply.read()
        except httpx.RequestError as error:
            if not self.state.ended:
                raise self.exchange.stream_broken_off(error, self.state.tokens) from error
            piece = None
        if self.state.ended:
            await self.close()
        elif piece is None:
            raise self.state.cut()
        else:
            self.state.push(piece)
