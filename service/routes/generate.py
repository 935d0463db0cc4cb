"""POST /generate: sampling, as one JSON reply or as a stream of events."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from model.engine.api import (
    FinishEvent,
    GenerationRequest,
    PromptEvent,
    TokenEvent,
)
from service import sse
from service.async_engine import EngineStopped, Submission
from service.errors import ApiError, from_finish, unavailable
from service.openapi import ERRORS
from service.replies import (
    Completion,
    envelope,
    first_likeliest,
    new_id,
    scored_json,
    server_timing,
    timings,
    usage,
)
from service.requests import (
    body_of,
    described_by,
    generation_requests,
    prompt_ids,
    submit,
    unless_gone,
)
from service.schemas import GenerateReply, GenerateRequest
from service.state import Ready, Served

router = APIRouter()

GenerateBody = Annotated[GenerateRequest, Depends(body_of(GenerateRequest))]


@router.post(
    "/generate",
    response_model=GenerateReply,
    responses=ERRORS,
    openapi_extra=described_by(GenerateRequest),
    summary="Generate text",
    tags=["generation"],
)
async def generate(body: GenerateBody, served: Ready, request: Request) -> Response:
    """Continue a prompt. With `stream`, server-sent events: chunks of the reply's shape whose
    choices hold what is new, then one with `usage` and `timings`, then `[DONE]`.

    The same request with the same seed gives the same tokens, alone or among others."""
    served.check_model(body.model)
    prompts = await prompt_ids(body.prompt, served, body.n)
    generation = Generation(body, generation_requests(body, prompts, served), served)
    if not body.stream:
        reply = await unless_gone(request, generation.reply())
        return Response(
            orjson.dumps(reply),
            media_type="application/json",
            headers=server_timing(generation.finishes),
        )
    return sse.StreamedResponse(
        generation.events(),
        on_end=generation.submission.abort,
        write_timeout=served.settings.slow_reader_timeout,
        media_type="text/event-stream",
    )


class Generation:
    """One accepted request: its submission, and the completions that grow from it."""

    def __init__(
        self, body: GenerateRequest, requests: list[GenerationRequest], served: Served
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer = served.checkpoint.tokenizer
        self._head = envelope(new_id("gen"), served.checkpoint)
        self._seed = requests[0].params.seed
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
        self.submission: Submission = submit(served, requests)

    async def reply(self) -> dict[str, Any]:
        """The whole answer; whatever ends this call ends the generation."""
        try:
            while not self.submission.finished:
                await self._advance(timeout=None)
        finally:
            self.submission.abort()
        choices = [completion.take() for completion in self._completions.values()]
        return {**self._head, "choices": choices, **self._take_scores(), **self._tail()}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        try:
            while not self.submission.finished:
                if not await self._advance(timeout=sse.KEEP_ALIVE_SECONDS):
                    yield sse.KEEP_ALIVE
                    continue
                new = (completion.take() for completion in self._completions.values())
                choices, scores = [one for one in new if one is not None], self._take_scores()
                if choices or scores:
                    yield sse.event({**self._head, "choices": choices, **scores})
            yield sse.event({**self._head, "choices": [], **self._tail()})
        except ApiError as error:
            yield sse.event(error.body())
        yield sse.DONE

    async def _advance(self, timeout: float | None) -> bool:
        """Take in the events since the last call. False when there were none in `timeout`."""
        try:
            events = await self.submission.take(timeout)
        except EngineStopped as error:
            raise unavailable(str(error)) from error
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
        return {"prompts": sorted(prompts, key=lambda one: one["index"])} if prompts else {}

    def _finish(self, event: FinishEvent) -> None:
        completion = self._completions[event.request_id, event.index]
        self.finishes.append(event)
        if not completion.finished and (error := from_finish(event)) is not None:
            raise error
        completion.finish(event)

    def _tail(self) -> dict[str, Any]:
        generated = sum(completion.generated for completion in self._completions.values())
        return {
            "usage": usage(self.finishes, generated),
            "seed": self._seed,
            "timings": timings(self.finishes, generated),
        }
