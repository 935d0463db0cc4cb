"""Completions: sends sampled text, as one reply or as a stream of chunks.

A sequence is aborted once its text has reached a stop string. An endpoint with another reply format
than /generate has a `ResponseFormat`. `model/operations/completion.py` turns tokens into text.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from logitd.model.inference.engine.events import FinishEvent
from logitd.model.operations.completion import GrowingReply
from logitd.model.operations.operation import Completions, envelope
from logitd.service.errors import EXPECTED, as_api_error, raise_failure
from logitd.service.http import sse
from logitd.service.http.envelope import server_timing, timings
from logitd.service.models.context import RequestContext


class ResponseFormat(Protocol):
    """Converts replies of /generate to another endpoint's format. Methods are called in the order
    of the events, so an implementation may keep state."""

    def reply(self, reply: dict[str, Any]) -> Any:
        """Convert a whole reply of /generate."""
        ...

    def chunks(self, chunk: dict[str, Any], counts: dict[str, int]) -> Iterable[dict[str, Any]]:
        """Convert one chunk of a /generate stream. `counts` are the numbers of prompt tokens,
        completion tokens and all tokens so far."""
        ...


async def respond(generation: "Generation", context: RequestContext, *, stream: bool) -> Response:
    if not stream:
        reply = await context.unless_gone(generation.reply())
        headers = server_timing(generation.growing.finishes)
        return Response(reply, media_type="application/json", headers=headers)
    return sse.StreamedResponse(
        generation.events(),
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
    ) -> None:
        """Submit the plan. Raises like `EngineSession.submit`. Without `response_format`, the reply
        has the format of /generate."""
        self._submission = context.session.submit(plan.requests)
        self.growing = GrowingReply(plan, context.checkpoint.tokenizer)
        self._head = envelope("gen", context.model.name, context.checkpoint)
        self._lists_tokens = plan.logprobs is not None or plan.prompt_logprobs is not None
        self._format = response_format

    def abort(self) -> None:
        """End the sequences, because the client has left."""
        self._submission.abort()

    async def reply(self) -> bytes:
        """Return the whole reply as JSON. Cancelling this call ends the generation. A reply that
        lists tokens may be long, so it is written in a thread while streams continue."""
        try:
            while not self._submission.finished:
                await self._advance(timeout=None)
        finally:
            self.abort()
        return await asyncio.to_thread(self._write) if self._lists_tokens else self._write()

    def _write(self) -> bytes:
        reply = {**self._head, **self.growing.take_json(), **self._tail()}
        return orjson.dumps(reply if self._format is None else self._format.reply(reply))

    async def events(self) -> AsyncIterator[bytes]:
        try:
            while not self._submission.finished:
                if not await self._advance(timeout=sse.KEEP_ALIVE_SECONDS):
                    yield sse.KEEP_ALIVE
                    continue
                new = self.growing.take_json()
                if (new["choices"] or "prompts" in new) and (part := self._part(new)):
                    yield part
            if part := self._part({"choices": [], **self._tail()}):
                yield part
        except EXPECTED as error:
            yield sse.event(as_api_error(error).body())
        yield sse.DONE

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

    async def _advance(self, timeout: float | None) -> bool:
        """Add the events since the last call. Returns False if none comes within `timeout`
        seconds."""
        events = await self._submission.take(timeout)
        for event in events:
            if isinstance(event, FinishEvent) and not self.growing.is_finished(event):
                raise_failure(event)
            if self.growing.push(event):
                self._submission.stop(event.request_id, event.index)  # type: ignore[union-attr]
        return bool(events)

    def _tail(self) -> dict[str, Any]:
        growing = self.growing
        return {
            "usage": growing.usage(),
            "seed": growing.seed,
            "timings": timings(growing.finishes, growing.generated),
        }
