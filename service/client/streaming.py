"""Streaming: parses the bytes of a stream into chunks, and joins the chunks into a `Generation`.

`AsyncStream` and `Stream` receive the bytes; `StreamState` parses them. Lines end with LF, or with
CRLF if a proxy has changed them. Comments are skipped.
"""

import json
from collections import deque
from dataclasses import dataclass, replace
from typing import Self

import httpx

from logitd.service.client import errors
from logitd.service.client.calls import with_request_id
from logitd.service.client.errors import LogitdError, MalformedReplyError, StreamError
from logitd.service.client.reading import WrongShape, read
from logitd.service.client.results import (
    Choice,
    Chunk,
    Generation,
    ScoredPrompt,
    Timings,
    Token,
    Usage,
)
from logitd.service.client.transport import Exchange
from logitd.service.client.wire import Reply, Wire, begin, finish

END = b"[DONE]"


class EventDecoder:
    """Extracts the data of server-sent events from a stream's bytes, which may arrive in pieces of
    any size."""

    def __init__(self) -> None:
        self._rest = b""  # the incomplete line
        self._data: list[bytes] = []  # the data lines of the incomplete event

    def push(self, piece: bytes) -> list[bytes]:
        """Add a piece of the stream. Returns the data of each event that is now complete."""
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
    """Members that only a stream's last chunk has."""

    usage: Usage
    seed: int | None
    timings: Timings


class StreamState:
    """The part of a stream received so far. `ended` is True after the server's last event."""

    def __init__(self) -> None:
        self.request_id = ""
        self.ended = False
        self._decoder = EventDecoder()
        self._events: deque[bytes] = deque()
        self._choices: dict[int, list[Choice]] = {}  # pieces by index of the choice
        self._prompts: dict[int, list[Token]] = {}
        self._last: Chunk | None = None
        self._tail: _Tail | None = None

    def push(self, piece: bytes) -> None:
        """Add received bytes."""
        self._events += self._decoder.push(piece)

    def next(self) -> Chunk | None:
        """The next chunk with choices or prompts; None if more bytes are needed, or at the end. If
        the server sent an error, raises it."""
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
        """The error for a stream whose last event is missing."""
        message = f"the stream ended without its last event, after {self.tokens} tokens"
        return StreamError(message, self.tokens, self.request_id)

    @property
    def text(self) -> str:
        """The text of the first choice so far."""
        return "".join(piece.text for piece in self._choices.get(0, ()))

    @property
    def tokens(self) -> int:
        """Number of tokens of all choices so far."""
        return sum(len(piece.token_ids) for pieces in self._choices.values() for piece in pieces)

    @property
    def tail(self) -> _Tail:
        """Usage, seed and timings. Raises LogitdError before the end of the stream."""
        if self._tail is None:
            raise LogitdError(
                f"the stream has not ended after {self.tokens} tokens: usage, seed and timings "
                "come with its last chunk, so read all chunks first",
                self.request_id,
            )
        return self._tail

    def result(self) -> Generation:
        """The reply that the same request would get without streaming. Raises StreamError if the
        stream's last event has not arrived."""
        last, tail = self._last, self._tail
        if not self.ended or last is None or tail is None:
            raise StreamError(
                f"the result is incomplete, because the stream ended early, after {self.tokens} "
                "tokens; `text` has the text so far",
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
            raise self._malformed("the event is not JSON") from error
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
            raise self._malformed("[DONE] was sent before the usage or any choice")

    def _malformed(self, reason: str) -> MalformedReplyError:
        message = f"this client cannot read an event of the stream: {reason}"
        return MalformedReplyError(message, self.request_id)


def _joined(pieces: list[Choice]) -> Choice:
    """Join the pieces of a choice."""
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


class _Received:
    """The part of a generation that has been received."""

    def __init__(self, exchange: Exchange, state: StreamState) -> None:
        self._exchange = exchange
        self._state = state

    @property
    def text(self) -> str:
        """The text of the first completion so far."""
        return self._state.text

    @property
    def usage(self) -> Usage:
        """Token counts, known at the end of the stream. Raises LogitdError before then."""
        return self._state.tail.usage

    @property
    def seed(self) -> int | None:
        """The seed, known at the end of the stream. It is None if each prompt has its own seed; the
        choices then contain the seeds. Raises LogitdError before the end."""
        return self._state.tail.seed

    @property
    def timings(self) -> Timings:
        """Duration of each phase, known at the end of the stream. Raises LogitdError before
        then."""
        return self._state.tail.timings

    @property
    def request_id(self) -> str:
        return self._exchange.request_id


class AsyncStream(_Received):
    """A generation that is being received. Iterate over its chunks in an `async with` block, which
    closes the stream at its end. Closing early ends the request on the server.

    If the server sends an error, the iteration raises it after the chunks that came before it. If
    the stream ends early, the iteration raises StreamError. `text` is the text received so far.
    """

    def __init__(self, wire: Wire, exchange: Exchange) -> None:
        super().__init__(exchange, StreamState())
        self._wire = wire
        self._reply: Reply | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        if not self._closed:
            await self._open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while not self._closed:
                if (chunk := self._state.next()) is not None:
                    return chunk
                await self._receive()
        except BaseException:
            await self.close()
            raise
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the request, if the server has not finished it."""
        self._closed = True
        if self._reply is not None:
            await self._reply.close()

    async def result(self) -> Generation:
        """Read the remaining chunks. Returns the whole reply, as `generate` does."""
        async for _ in self:
            continue
        return self._state.result()

    async def _open(self) -> Reply:
        """Return the reply. The first call sends the request."""
        if self._reply is None:
            self._reply = await begin(self._wire, self._exchange)
            self._state.request_id = self._exchange.request_id
        return self._reply

    async def _receive(self) -> None:
        """Read the next piece. After the last event, read once more: httpx reuses a connection only
        if the reply was read to its end."""
        reply = await self._open()
        try:
            piece = await reply.read()
        except httpx.RequestError as error:
            if not self._state.ended:
                tokens = self._state.tokens
                raise self._exchange.broken_off(error, tokens, stream=True) from error
            piece = None
        if self._state.ended:
            await self.close()
        elif piece is None:
            raise self._state.cut()
        else:
            self._state.push(piece)


class Stream(_Received):
    """The blocking counterpart of `AsyncStream`, for use in a `with` block."""

    def __init__(self, stream: AsyncStream) -> None:
        super().__init__(stream._exchange, stream._state)
        self._stream = stream

    def __enter__(self) -> Self:
        finish(self._stream.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            return finish(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the request, if the server has not finished it."""
        finish(self._stream.close())

    def result(self) -> Generation:
        """Read the remaining chunks. Returns the whole reply, as `generate` does."""
        return finish(self._stream.result())
