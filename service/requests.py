"""From a validated body to requests that the engine takes.

Reads bodies strictly, turns prompts into token ids, resolves what a field means for this model
(what fits, which tokens stop, which seed) and refuses, with the numbers, what cannot run. Nothing
is queued here.
"""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from model.constraint import Constraint
from model.engine.api import GenerationRequest, InvalidRequest, LogitsRequest, SamplingParams
from model.tokenizer import Tokenizer
from service import schemas
from service.async_engine import EngineStopped, QueueFull, Reservation, Submission
from service.errors import (
    ApiError,
    bad_request,
    body_too_large,
    client_gone,
    clip,
    context_too_long,
    from_invalid,
    from_validation,
    unavailable,
)
from service.replies import new_id
from service.state import Served

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")

THREAD_CHARACTERS = 100_000
"""Longer texts are encoded beside the event loop, not on it."""

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""An id as the key of a JSON object: one spelling each, so that no key overwrites another."""


def body_of(model: type[Body]) -> Callable[[Request], Awaitable[Body]]:
    """A dependency that reads a request's JSON into `model`.

    pydantic reads the raw bytes: unlike the usual way through Python objects, that refuses NaN,
    Infinity, 1e999, lone surrogates and bodies that are not UTF-8.
    """

    async def read(request: Request) -> Body:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise ApiError(
                415,
                "invalid_request_error",
                f"the body's content type is {clip(media_type)!r}; send application/json "
                "(curl: --json, or -H 'Content-Type: application/json')",
            )
        raw = await _bounded_body(request)
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            raise from_validation(error) from error

    return read


def described_by(model: type[schemas.RequestBody]) -> dict[str, Any]:
    """The OpenAPI description of a body that `body_of` reads."""
    content = {
        "schema": {"$ref": f"#/components/schemas/{model.__name__}"},
        "examples": {
            summary: {"summary": summary, "value": body} for summary, body in model.examples.items()
        },
    }
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


async def prompt_ids(prompt: Any, served: Served, n: int = 1) -> list[tuple[int, ...]]:
    """The token ids of each prompt of a body, unless they make more sequences than can run."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt:
        raise bad_request("the prompt is empty; give at least one token", "prompt")
    sequences = len(prompt) * n
    _check_sequences(sequences, "prompt" if n == 1 else "n", served)
    _translated(lambda: served.engine.check_room(sequences))  # before any text is encoded
    tokenizer, context = served.checkpoint.tokenizer, served.context_length
    ids = []
    for one in prompt:
        encoded = await _encode(one, tokenizer, context) if isinstance(one, str) else tuple(one)
        if not encoded:
            raise bad_request("the prompt is empty; give at least one token", "prompt")
        _check_ids("prompt", encoded, tokenizer.vocab_size)
        ids.append(encoded)
    return ids


def generation_requests(
    body: schemas.GenerateRequest,
    prompts: list[tuple[int, ...]],
    served: Served,
    constraint: Constraint | None,
    deadline: float | None,
) -> list[GenerationRequest]:
    """One engine request per prompt, or ApiError."""
    seed = secrets.randbits(63) if body.seed is None else body.seed
    tokenizer = served.checkpoint.tokenizer
    requests = []
    for prompt in prompts:
        room = served.context_length - len(prompt)
        max_tokens = max(room, 0) if body.max_tokens is None else body.max_tokens
        if room < 1 or max_tokens > room:
            raise context_too_long(len(prompt), max_tokens, served.context_length)
        requests.append(
            GenerationRequest(
                request_id=new_id("gen"),
                token_ids=prompt,
                params=_sampling_params(body, max_tokens, seed, tokenizer, constraint),
                n=body.n,
                prompt_logprobs=_prompt_logprobs(body),
                priority=body.priority,
                prefix_reuse=body.prefix_reuse,
                deadline=deadline,
            )
        )
    _check_generation_logprobs(body, requests, served)
    return requests


def _prompt_logprobs(body: schemas.GenerateRequest) -> int | None:
    """Those of the prompt's tokens: asked for as such, or by an echo with logprobs."""
    echoed = body.logprobs if body.echo else None
    return max((k for k in (body.prompt_logprobs, echoed) if k is not None), default=None)


def _check_generation_logprobs(
    body: schemas.GenerateRequest, requests: list[GenerationRequest], served: Served
) -> None:
    """Refuse a request whose reply could hold more logprobs than are allowed in one."""
    generated = sum(request.params.max_tokens for request in requests) * body.n
    prompted = sum(len(request.token_ids) for request in requests)
    count, param = 0, "logprobs"
    if body.prompt_logprobs is not None:
        count, param = prompted * (1 + body.prompt_logprobs), "prompt_logprobs"
    if body.logprobs is not None:
        echoed = prompted * body.n if body.echo else 0
        count, param = count + (generated + echoed) * (1 + body.logprobs), "logprobs"
    check_logprobs(param, count, served)


def logits_request(
    prompt: tuple[int, ...],
    positions: str | list[int],
    served: Served,
    *,
    columns: list[int] | None = None,
    timeout: float | None = None,
) -> LogitsRequest:
    """The rows of one prompt, or ApiError."""
    length = len(prompt)
    if length > served.context_length:
        raise bad_request(
            f"the prompt has {length} tokens; the model's context is {served.context_length}. "
            f"Shorten it by {length - served.context_length} tokens",
            "prompt",
            "context_length_exceeded",
        )
    return LogitsRequest(
        request_id=new_id("logits"),
        token_ids=prompt,
        positions=_positions(positions, length),
        columns=None if columns is None else tuple(columns),
        deadline=deadline_of(timeout, served),
    )


def check_choice(token_ids: list[int] | None, top_k: int | None, served: Served) -> None:
    """Refuse ids outside the vocabulary, or more of them than it has."""
    vocab_size = served.checkpoint.tokenizer.vocab_size
    if token_ids is not None:
        _check_ids("token_ids", token_ids, vocab_size)
    if top_k is not None and top_k > vocab_size:
        raise bad_request(f"top_k is {top_k}; the vocabulary has {vocab_size} ids", "top_k")


def check_logprobs(param: str, count: int, served: Served) -> None:
    """Refuse more logprobs than one reply may hold: they are in memory together."""
    limit = served.settings.max_logprobs
    if count > limit:
        raise bad_request(
            f"the reply could hold {count} logprobs; {limit} are allowed in one. Ask for less, or "
            "raise --max-logprobs",
            param,
        )


def submit(served: Served, requests: list[GenerationRequest] | list[LogitsRequest]) -> Submission:
    """Queue requests, or raise the ApiError that says why not."""
    return _translated(lambda: served.engine.submit(requests))


def reserve(served: Served, requests: list[LogitsRequest]) -> Reservation:
    """Room for requests that run one after the other, or the ApiError that says why not."""
    return _translated(lambda: served.engine.reserve(requests))


def submit_next(reservation: Reservation) -> Submission:
    """Queue the next request of a reservation."""
    return _translated(reservation.submit_next)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, but cancel it when the client goes: a plain handler would not notice."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise client_gone()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _bounded_body(request: Request) -> bytes:
    """The body, read no further than the limit; not at all where it says that it is longer."""
    limit: int = request.app.state.service.settings.max_body_bytes
    if int(request.headers.get("content-length", "0")) > limit:  # the parser took it for a number
        raise body_too_large(limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise body_too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise client_gone() from error
    return b"".join(chunks)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _translated(call: Callable[[], Result]) -> Result:
    """The engine's refusals as the client sees them."""
    try:
        return call()
    except InvalidRequest as error:
        raise from_invalid(error) from error
    except QueueFull as error:
        raise ApiError(
            429,
            "rate_limit_error",
            f"{error}; try again in about {error.retry_after} s",
            None,
            "queue_full",
            error.retry_after,
        ) from error
    except EngineStopped as error:
        raise unavailable(str(error)) from error


async def _encode(text: str, tokenizer: Tokenizer, context: int) -> tuple[int, ...]:
    least = -(-len(text.encode()) // tokenizer.longest_token)
    if least > context:
        raise bad_request(
            f"the prompt has {len(text)} characters, at least {least} tokens; the model's context "
            f"is {context}. Shorten the prompt",
            "prompt",
            "context_length_exceeded",
        )
    try:
        if len(text) > THREAD_CHARACTERS:
            return tuple(await asyncio.to_thread(tokenizer.encode, text))
        return tuple(tokenizer.encode(text))
    except ValueError as error:  # the pattern gave up on a pathological text
        raise bad_request(f"the prompt cannot be tokenized: {error}", "prompt") from error


def _sampling_params(
    body: schemas.GenerateRequest,
    max_tokens: int,
    seed: int,
    tokenizer: Tokenizer,
    constraint: Constraint | None,
) -> SamplingParams:
    stop_token_ids = set(body.stop_token_ids)
    if tokenizer.end_of_text is not None and not body.ignore_eos:
        stop_token_ids.add(tokenizer.end_of_text)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=_logit_bias(body.logit_bias),
            allowed_token_ids=(
                None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
            ),
            constraint=constraint,
            stop_token_ids=frozenset(stop_token_ids),
            min_tokens=body.min_tokens,
            logprobs=body.logprobs,
            logprobs_stage=body.logprobs_stage,
        )
    except InvalidRequest as error:
        raise from_invalid(error) from error


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings; ours are ids."""
    for key in biases:
        if not TOKEN_ID.fullmatch(key):
            raise bad_request(
                f"logit_bias has the key {clip(key)!r}; keys are token ids", "logit_bias"
            )
    return {int(key): bias for key, bias in biases.items()}


def _positions(positions: str | list[int], length: int) -> tuple[int, ...]:
    if positions == "last":
        return (length - 1,)
    if positions == "all":
        return tuple(range(length))
    for position in positions:
        if not isinstance(position, int) or not -length <= position < length:
            raise bad_request(
                f"position {position} is outside the prompt of {length} tokens "
                f"(0 to {length - 1}, or -{length} to -1 from the end)",
                "positions",
            )
    resolved = [int(position) % length for position in positions]
    if resolved != sorted(set(resolved)):
        raise bad_request(f"positions {resolved[:20]} must be ascending and distinct", "positions")
    return tuple(resolved)


def _check_sequences(count: int, param: str, served: Served) -> None:
    settings = served.settings
    if count > settings.max_sequences:
        raise bad_request(
            f"the request has {count} sequences (prompts times n); {settings.max_sequences} are "
            "allowed in one. Send less, or raise --max-sequences",
            param,
        )
    if count > settings.slots + settings.max_queue:
        raise bad_request(
            f"the request has {count} sequences (prompts times n); {settings.slots} slots and a "
            f"queue of {settings.max_queue} never have room for so many. Send less, or raise "
            "--max-queue",
            param,
        )


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if (largest := max(token_ids)) >= vocab_size:
        raise bad_request(
            f"token id {largest} in {param} is outside the vocabulary of {vocab_size} ids "
            f"(0 to {vocab_size - 1})",
            param,
        )


def deadline_of(timeout: float | None, served: Served) -> float | None:
    return None if timeout is None else served.engine.now() + timeout
