"""Generation: one submitted request, from the engine's events to a reply.

Grows the completions, ends those whose text reached a stop string, and gives one reply or a stream
of chunks as /generate writes them. An endpoint that writes them otherwise has a `ResponseFormat`.
Not here: which engine requests a body becomes (`service/api/requests/resolve.py`).
"""

from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import orjson
from fastapi import Request
from starlette.responses import Response

from logitd.model.inference.engine.events import FinishEvent, PromptEvent, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.service.api.requests.body import unless_gone
from logitd.service.api.responses import sse
from logitd.service.api.responses.text import (
    Completion,
    envelope,
    first_likeliest,
    scored_json,
    server_timing,
    timings,
    usage,
)
from logitd.service.core.errors import EXPECTED, as_api_error, from_finish
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.engine.submission import Submission
from logitd.service.schemas.generate import GenerateRequest


class ResponseFormat(Protocol):
    """How an endpoint writes a generation. Called in the order of the events; may keep state."""

    def reply(self, reply: dict[str, Any]) -> Any:
        """The reply, from that of /generate."""
        ...

    def chunks(self, chunk: dict[str, Any], counts: dict[str, int]) -> Iterable[dict[str, Any]]:
        """The chunks of a stream, from one of /generate. `counts` are the prompt, completion and
        total tokens so far."""
        ...


class NativeFormat:
    """The format of /generate itself."""

    def reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        return reply

    def chunks(self, chunk: dict[str, Any], counts: dict[str, int]) -> Iterable[dict[str, Any]]:
        return (chunk,)


async def respond(request: Request, generation: "Generation", *, stream: bool) -> Response:
    """The response of a generation; a client that goes ends it."""
    if not stream:
        reply = await unless_gone(request, generation.reply())
        return Response(
            orjson.dumps(reply),
            media_type="application/json",
            headers=server_timing(generation.finishes),
        )
    return sse.StreamedResponse(
        generation.events(),
        on_end=generation.submission.abort,
        write_timeout=generation.slow_reader_timeout,
        media_type=sse.MEDIA_TYPE,
        waits=True,
    )


class Generation:
    """One submitted request: its submission, and the completions that grow from it."""

    def __init__(
        self,
        body: GenerateRequest,
        requests: list[GenerationRequest],
        submission: Submission,
        served: Served,
        response_format: ResponseFormat,
    ) -> None:
        self._body = body
        self._format = response_format
        self._tokenizer = tokenizer = served.checkpoint.tokenizer
        self._head = envelope(new_id("gen"), served.checkpoint)
        self._seed = requests[0].params.seed
        self._prompt_tokens = sum(len(request.token_ids) for request in requests)
        self._completions = {
            (request.request_id, index): Completion(
                tokenizer,
                index=prompt_index * body.n + index,
                prompt_index=prompt_index,
                stop=body.stop_texts,
                stop_token_ids=request.params.stop_token_ids,
                echo=request.token_ids if body.echo else (),
            )
            for prompt_index, request in enumerate(requests)
            for index in range(body.n)
        }
        self._prompts = {request.request_id: index for index, request in enumerate(requests)}
        self._scores: dict[int, list[dict[str, Any]]] = {}  # new ones, by prompt
        self.finishes: list[FinishEvent] = []
        self.slow_reader_timeout = served.settings.slow_reader_timeout
        self.submission = submission

    async def reply(self) -> dict[str, Any]:
        """The whole answer; whatever ends this call ends the generation."""
        try:
            while not self.submission.finished:
                await self._advance(timeout=None)
        finally:
            self.submission.abort()
        choices = [completion.take() for completion in self._completions.values()]
        return self._format.reply(
            {**self._head, "choices": choices, **self._take_scores(), **self._tail()}
        )

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        try:
            while not self.submission.finished:
                if not await self._advance(timeout=sse.KEEP_ALIVE_SECONDS):
                    yield sse.KEEP_ALIVE
                    continue
                new = (completion.take() for completion in self._completions.values())
                choices = [choice for choice in new if choice is not None]
                scores = self._take_scores()
                if (choices or scores) and (part := self._part(choices=choices, **scores)):
                    yield part
            if part := self._part(choices=[], **self._tail()):
                yield part
        except EXPECTED as error:
            yield sse.event(as_api_error(error).body())
        yield sse.DONE

    def _part(self, **chunk: Any) -> bytes:
        """The events of a chunk; empty if the format writes none."""
        generated = self._generated()
        counts = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
        }
        return b"".join(map(sse.event, self._format.chunks({**self._head, **chunk}, counts)))

    async def _advance(self, timeout: float | None) -> bool:
        """Take in the events since the last call. False when there were none in `timeout`."""
        events = await self.submission.take(timeout)
        for event in events:
            if isinstance(event, TokenEvent):
                if self._completions[event.request_id, event.index].push(event):
                    self.submission.stop(event.request_id, event.index)
            elif isinstance(event, PromptEvent):
                self._score(event)
            elif isinstance(event, FinishEvent):
                self._finish(event)
        return bool(events)

    def _score(self, event: PromptEvent) -> None:
        """Logprobs of a prompt's tokens: for the reply's `prompts`, for its echoes, or both."""
        prompt_index, body = self._prompts[event.request_id], self._body
        if body.prompt_logprobs is not None:
            tokens = [first_likeliest(token, body.prompt_logprobs) for token in event.tokens]
            new = [scored_json(self._tokenizer, token) for token in tokens]
            self._scores.setdefault(prompt_index, []).extend(new)
        if body.echo and body.logprobs is not None:
            tokens = [first_likeliest(token, body.logprobs) for token in event.tokens]
            for index in range(body.n):
                self._completions[event.request_id, index].push_prompt(tokens)

    def _take_scores(self) -> dict[str, Any]:
        """The member `prompts` of a reply with what is new; none when nothing is."""
        scores, self._scores = self._scores, {}
        prompts = [{"index": index, "tokens": tokens} for index, tokens in scores.items()]
        return {"prompts": sorted(prompts, key=lambda prompt: prompt["index"])} if prompts else {}

    def _finish(self, event: FinishEvent) -> None:
        completion = self._completions[event.request_id, event.index]
        self.finishes.append(event)
        if not completion.finished and (error := from_finish(event)) is not None:
            raise error
        completion.finish(event)

    def _generated(self) -> int:
        return sum(completion.generated for completion in self._completions.values())

    def _tail(self) -> dict[str, Any]:
        generated = self._generated()
        return {
            "usage": usage(self.finishes, generated),
            "seed": self._seed,
            "timings": timings(self.finishes, generated),
        }
