"""Completions: sends sampled text, as one reply or as a stream of chunks.

A sequence is aborted once its text has reached a stop string. An endpoint whose reply format
differs from the format of /generate has a `ResponseFormat`. `model/operations/completion.py` turns
tokens into text.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from logitd.model.inference.engine.events import Event, FinishEvent
from logitd.model.operations.completion import GrowingReply
from logitd.model.operations.operation import Completions, envelope
from logitd.service.body_writer import BodyWriter, body_writer
from logitd.service.errors import EXPECTED, as_api_error, raise_failure
from logitd.service.http import sse
from logitd.service.http.envelope import server_timing, timings
from logitd.service.models.context import RequestContext

MOST_LISTED = 256
"""Maximum number of logprobs listed in a step for which the event loop itself converts the step's
tokens to JSON. One takes about 7 us."""


class ResponseFormat(Protocol):
    """Converts replies of /generate to another endpoint's format. Methods are called in the order
    of the events, so an implementation may keep state."""

    def reply(self, reply: dict[str, Any]) -> Any:
        """Convert a whole reply of /generate."""
        ...

    def chunks(self, chunk: dict[str, Any], counts: dict[str, int]) -> Iterable[dict[str, Any]]:
        """Convert one chunk of a /generate stream. `counts` has the number of prompt tokens, of
        completion tokens and of all tokens so far."""
        ...


async def respond(generation: "Generation", context: RequestContext, *, stream: bool) -> Response:
    if not stream:
        reply = await context.unless_gone(generation.reply())
        headers = server_timing(generation.growing.finishes)
        return Response(reply, media_type="application/json", headers=headers)
    return sse.StreamedResponse(
        generation.events(body_writer(context.request.scope)),
        on_end=generation.abort,
        write_timeout=context.model.settings.slow_reader_timeout,
        media_type=sse.MEDIA_TYPE,
        waits=True,
    )


class Generation:
    """A submitted request and its reply, which grows token by token."""

    def __init__(
        self,
        plan: Completions,
        context: RequestContext,
        response_format: ResponseFormat | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Submit the plan. Raises the same errors as `EngineSession.submit`. Without
        `response_format`, the reply has the format of /generate. `names` maps fields of /generate
        to the client's fields, for errors."""
        self._submission = context.session.submit(plan.requests)
        self.growing = GrowingReply(plan, context.checkpoint.tokenizer)
        self._head = envelope("gen", context.model.name, context.checkpoint)
        self._lists_tokens = plan.logprobs is not None or plan.prompt_logprobs is not None
        listed = (plan.logprobs or 0) * plan.n * len(plan.requests)
        of_prompts = plan.prompt_logprobs is not None or (plan.echo and plan.logprobs is not None)
        self._is_quick = listed <= MOST_LISTED and not of_prompts
        self._format = response_format
        self._names = names
        self._waits = False  # the task that sends the reply waits for events
        self._sent = 0.0  # time.monotonic() when something was last sent

    def abort(self) -> None:
        """End the sequences that are still running."""
        self._submission.reader = None
        self._submission.abort()

    async def reply(self) -> bytes:
        """Return the whole reply as JSON. Cancelling this call ends the generation. A reply that
        lists tokens may be long, so it is converted to JSON in a thread while streams continue."""
        self._submission.reader = self._read_new
        try:
            while not self._submission.finished:
                self._push(await self._submission.take())
        finally:
            self.abort()
        return await asyncio.to_thread(self._write) if self._lists_tokens else self._write()

    def _write(self) -> bytes:
        reply = {**self._head, **self.growing.take_json(), **self._tail()}
        return orjson.dumps(reply if self._format is None else self._format.reply(reply))

    async def events(self, write: BodyWriter | None) -> AsyncIterator[bytes]:
        """The events of a stream. While this iterator waits, new events are passed directly to
        `write`, if it is given, the client keeps up and little is listed, so that no task has to
        wake."""
        self._sent = time.monotonic()
        if write is not None and self._is_quick:
            self._submission.reader = partial(self._write_new, write)
        try:
            while not self._submission.finished:
                self._waits = True
                silent = time.monotonic() - self._sent
                new = await self._submission.take(max(0.0, sse.KEEP_ALIVE_SECONDS - silent))
                self._waits = False
                part = await self._grown_apart(new) if new else b""
                silent = time.monotonic() - self._sent
                if not part and silent >= sse.KEEP_ALIVE_SECONDS and not self._submission.finished:
                    part = sse.KEEP_ALIVE
                if part:
                    yield part
                    self._sent = time.monotonic()
            if part := self._part({"choices": [], **self._tail()}):
                yield part
        except EXPECTED as error:
            if part := await self._grown_apart(()):  # what arrived together with the error
                yield part
            yield sse.event(as_api_error(error).body())
        yield sse.DONE

    def _read_new(self) -> bool:
        """Add the events in the mailbox to the reply. Returns False at the end of the reply."""
        self._push(self._submission.take_now())
        return not self._submission.finished

    def _write_new(self, write: BodyWriter) -> bool:
        """Write the events in the mailbox. Returns False if the task in `events` must continue: at
        the end of the stream, or if the client reads slowly."""
        if not self._waits:
            return False
        if part := self._grown(self._submission.take_now()):
            self._sent = time.monotonic()
            self._waits = write(part)
        return not self._submission.finished

    def _part(self, chunk: dict[str, Any]) -> bytes:
        whole = {**self._head, **chunk}
        if self._format is None:
            return sse.event(whole)
        prompt_tokens, generated = self.growing.prompt_tokens, self.growing.generated
        counts = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        }
        return b"".join(map(sse.event, self._format.chunks(whole, counts)))

    def _grown(self, events: Sequence[Event]) -> bytes:
        """Add events to the reply. Returns the part of the stream that they add, which may be
        empty."""
        self._push(events)
        return self._new_part()

    async def _grown_apart(self, events: Sequence[Event]) -> bytes:
        """Like `_grown`, but tokens with logprobs are converted in a thread: they may be many."""
        self._push(events)
        return await asyncio.to_thread(self._new_part) if self._lists_tokens else self._new_part()

    def _new_part(self) -> bytes:
        new = self.growing.take_json()
        return self._part(new) if new["choices"] or "prompts" in new else b""

    def _push(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, FinishEvent) and not self.growing.is_finished(event):
                param = self._names.get(event.param or "", event.param)
                raise_failure(replace(event, param=param))
            if self.growing.push(event):
                self._submission.stop(event.request_id, event.index)  # type: ignore[union-attr]

    def _tail(self) -> dict[str, Any]:
        growing = self.growing
        return {
            "usage": growing.usage(),
            "seed": growing.seed,
            "timings": timings(growing.finishes, growing.generated),
        }
