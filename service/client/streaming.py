"""Streaming: from the bytes of a stream to chunks, and to the generation that they add up to.

`StreamState` is what `Stream` and `AsyncStream` share: bytes go in, chunks come out, and it knows
what has come so far. It reads events as the server writes them (lines that end in LF, or CRLF from
a proxy) and passes over comments. Nothing is received here.
"""

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from logitd.service.client import errors
from logitd.service.client.arrays import Chunk
from logitd.service.client.calls import with_request_id
from logitd.service.client.errors import LogitdError, MalformedReplyError, StreamError
from logitd.service.client.reading import WrongShape, read
from logitd.service.client.results import Choice, Generation, ScoredPrompt, Timings, Token, Usage

END = b"[DONE]"


class EventDecoder:
    """The data of server-sent events, however the bytes are cut."""

    def __init__(self) -> None:
        self._rest = b""  # of a line
        self._data: list[bytes] = []  # of an event

    def push(self, piece: bytes) -> list[bytes]:
        """The events that are whole now."""
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


@dataclass(slots=True)
class _Growing:
    """A choice so far."""

    index: int
    prompt_index: int
    seed: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Token] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, new: Choice) -> None:
        self.texts.append(new.text)
        self.token_ids += new.token_ids
        if new.tokens is not None:
            self.tokens = self.tokens or []
            self.tokens += new.tokens
        if new.finish_reason is not None:
            self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason

    def choice(self) -> Choice:
        return Choice(
            index=self.index,
            prompt_index=self.prompt_index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            seed=self.seed,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            tokens=None if self.tokens is None else tuple(self.tokens),
        )


@dataclass(frozen=True, slots=True)
class _Tail:
    """What the last chunk says of the whole."""

    usage: Usage
    seed: int | None
    timings: Timings


class StreamState:
    """A stream as far as it has come. `ended` is True behind the server's last word."""

    def __init__(self) -> None:
        self.request_id = ""
        self.ended = False
        self._decoder = EventDecoder()
        self._events: deque[bytes] = deque()
        self._choices: dict[int, _Growing] = {}
        self._prompts: dict[int, list[Token]] = {}
        self._last: Chunk | None = None
        self._tail: _Tail | None = None

    def push(self, piece: bytes) -> None:
        """Take in what came."""
        self._events += self._decoder.push(piece)

    def next(self) -> Chunk | None:
        """The next chunk with something new; None until more has come, or behind the end. Raises
        the error that an event says."""
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
        """The error of a stream that stops without its end."""
        message = f"the stream ended without its end after {self.tokens} tokens"
        return StreamError(message, self.tokens, self.request_id)

    @property
    def text(self) -> str:
        """The first choice's text so far."""
        return "".join(self._choices[0].texts) if 0 in self._choices else ""

    @property
    def tokens(self) -> int:
        """Tokens that have come, of all choices."""
        return sum(len(choice.token_ids) for choice in self._choices.values())

    @property
    def tail(self) -> _Tail:
        """Usage, seed and timings; LogitdError before the end."""
        if self._tail is None:
            raise LogitdError(
                f"the stream has not come to its end, where its usage, seed and timings are; "
                f"{self.tokens} tokens have come",
                self.request_id,
            )
        return self._tail

    def result(self) -> Generation:
        """What an answer in one piece would have been; StreamError before the end."""
        last, tail = self._last, self._tail
        if not self.ended or last is None or tail is None:
            raise StreamError(
                f"the stream was left after {self.tokens} tokens, so there is no whole result",
                self.tokens,
                self.request_id,
            )
        return Generation(
            id=last.id,
            created=last.created,
            model=last.model,
            checkpoint=last.checkpoint,
            choices=tuple(self._choices[index].choice() for index in sorted(self._choices)),
            usage=tail.usage,
            seed=tail.seed,
            timings=tail.timings,
            request_id=self.request_id,
            prompts=self._scored_prompts(),
        )

    def _read(self, data: bytes) -> Chunk:
        """One event of the stream, added to what has come."""
        value = self._json(data)
        if isinstance(value, dict) and "error" in value:
            raise errors.from_event(value["error"], self.request_id)
        try:
            chunk: Chunk = read(Chunk, with_request_id(value, self.request_id))
            if "usage" in value:
                self._tail = read(_Tail, value)
        except WrongShape as error:
            raise self._malformed(str(error)) from error
        self._last = chunk
        for new in chunk.choices:
            growing = _Growing(new.index, new.prompt_index, new.seed)
            self._choices.setdefault(new.index, growing).add(new)
        for prompt in chunk.prompts or ():
            self._prompts.setdefault(prompt.index, []).extend(prompt.tokens)
        return chunk

    def _end(self) -> None:
        self.ended = True
        if self._tail is None or not self._choices:
            raise self._malformed("it ended without its usage, or without any choice")

    def _json(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._malformed("it is not JSON") from error

    def _scored_prompts(self) -> tuple[ScoredPrompt, ...] | None:
        scored = tuple(
            ScoredPrompt(index, tuple(tokens)) for index, tokens in sorted(self._prompts.items())
        )
        return scored or None

    def _malformed(self, what: str) -> MalformedReplyError:
        message = f"an event of the stream cannot be read: {what}"
        return MalformedReplyError(message, self.request_id)
