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
from model.engine.api import (
    AttentionWeights,
    GenerationRequest,
    HiddenStates,
    InvalidRequest,
    Logits,
    RowsRequest,
    SamplingParams,
    ScoreRequest,
)
from model.engine.api import (
    Request as EngineRequest,
)
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
from service.numbers.schemas import PositionChoice, PositionRange, Processing
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
            raise from_validation(error, model.model_fields) from error

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


async def prompt_ids(
    prompt: Any, served: Served, n: int = 1, param: str = "n"
) -> list[tuple[int, ...]]:
    """The token ids of each prompt of a body, unless they make more sequences than can run, `n`
    for each. `param` is the field that says so."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt:
        raise bad_request("the prompt is empty; give at least one token", "prompt")
    # Before any text is encoded.
    check_room(len(prompt) * n, "prompt" if n == 1 else param, served)
    return [await text_or_ids(one, "prompt", served) for one in prompt]


async def text_or_ids(given: str | Sequence[int], param: str, served: Served) -> tuple[int, ...]:
    """The token ids of one text of a body, or the ids that it gives; at least one."""
    tokenizer = served.checkpoint.tokenizer
    if isinstance(given, str):
        ids = await encode_within(given, param, tokenizer, served.context_length)
    else:
        ids = tuple(given)
    if not ids:
        raise bad_request(f"{_spoken(param)} is empty; give at least one token", param)
    _check_ids(param, ids, tokenizer.vocab_size)
    return ids


def encode_text(
    text: str, tokenizer: Tokenizer, param: str = "prompt", *, special_ids: bool = False
) -> list[int]:
    """`Tokenizer.encode`, or the ApiError that says why not; `param` is the text's field."""
    try:
        return tokenizer.encode(text, special_ids=special_ids)
    except ValueError as error:  # the pattern gave up on a pathological text
        raise bad_request(f"{_spoken(param)} cannot be tokenized: {error}", param) from error


def check_room(sequences: int, param: str, served: Served) -> None:
    """Refuse more sequences than one request may have, or than there is room for now."""
    _check_sequences(sequences, param, served)
    _translated(lambda: served.engine.check_room(sequences))


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


def rows_request(
    prompt: tuple[int, ...],
    positions: PositionChoice,
    wanted: Logits | HiddenStates | AttentionWeights,
    served: Served,
    *,
    timeout: float | None = None,
) -> RowsRequest:
    """What the model computes at some positions of one prompt, or ApiError."""
    check_length(len(prompt), "prompt", served)
    return RowsRequest(
        request_id=new_id("rows"),
        token_ids=prompt,
        positions=_positions(positions, len(prompt)),
        wanted=wanted,
        deadline=deadline_of(timeout, served),
    )


def score_request(
    prompt: tuple[int, ...],
    continuations: Sequence[tuple[int, ...]],
    served: Served,
    *,
    top: int,
    timeout: float | None = None,
) -> ScoreRequest:
    """The logprobs of a prompt, or of continuations of it, or ApiError."""
    check_length(len(prompt), "prompt", served)
    for continuation in continuations:
        check_length(len(prompt) + len(continuation), "continuations", served)
    return ScoreRequest(
        request_id=new_id("score"),
        token_ids=prompt,
        continuations=tuple(continuations),
        top=top,
        deadline=deadline_of(timeout, served),
    )


def check_length(length: int, param: str, served: Served) -> None:
    """Refuse more tokens than the model's context holds."""
    if length > served.context_length:
        what = "the prompt has" if param == "prompt" else "a prompt with its continuation has"
        raise bad_request(
            f"{what} {length} tokens; the model's context is {served.context_length}. "
            f"Shorten it by {length - served.context_length} tokens",
            param,
            "context_length_exceeded",
        )


def chosen(param: str, places: Sequence[int] | None, count: int, what: str) -> tuple[int, ...]:
    """Indices into `count` things, negative ones from the end, ascending; all of them for None."""
    if places is None:
        return tuple(range(count))
    for place in places:
        if not -count <= place < count:
            raise bad_request(
                f"{param} has {place}; {what} (0 to {count - 1}, or -{count} to -1 from the end)",
                param,
            )
    resolved = [place % count for place in places]
    if resolved != sorted(set(resolved)):
        raise bad_request(f"{param} {resolved[:20]} must be ascending and distinct", param)
    return tuple(resolved)


def wanted_logits(
    stage: str, processing: Processing | None, columns: Sequence[int] | None = None
) -> Logits:
    """What a body asks for of its logits: which columns, raw or processed."""
    chosen_columns = None if columns is None else tuple(columns)
    if stage == "raw":
        return Logits(columns=chosen_columns)
    fields = processing or Processing()
    allowed = fields.allowed_token_ids
    params = _translated(
        lambda: SamplingParams(
            max_tokens=1,
            seed=0,  # nothing is drawn
            temperature=fields.temperature,
            top_k=fields.top_k,
            top_p=fields.top_p,
            min_p=fields.min_p,
            repetition_penalty=fields.repetition_penalty,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            logit_bias=logit_bias(fields.logit_bias),
            allowed_token_ids=None if allowed is None else tuple(allowed),
        )
    )
    return Logits(
        columns=chosen_columns, processing=params, completion_start=fields.completion_start
    )


def check_choice(token_ids: list[int] | None, top_k: int | None, served: Served) -> None:
    """Refuse ids outside the vocabulary, or more of them than it has."""
    vocab_size = served.checkpoint.tokenizer.vocab_size
    if token_ids is not None:
        _check_ids("token_ids", token_ids, vocab_size)
    check_count("top_k", top_k, served)


def check_count(param: str, count: int | None, served: Served) -> None:
    """Refuse to list more ids than the vocabulary has."""
    vocab_size = served.checkpoint.tokenizer.vocab_size
    if count is not None and count > vocab_size:
        raise bad_request(f"{param} is {count}; the vocabulary has {vocab_size} ids", param)


def check_logprobs(param: str, count: int, served: Served) -> None:
    """Refuse more logprobs than one reply may hold: they are in memory together."""
    limit = served.settings.max_logprobs
    if count > limit:
        raise bad_request(
            f"the reply could hold {count} logprobs; {limit} are allowed in one. Ask for less, or "
            "raise --max-logprobs",
            param,
        )


def submit(served: Served, requests: Sequence[EngineRequest]) -> Submission:
    """Queue requests, or raise the ApiError that says why not."""
    return _translated(lambda: served.engine.submit(requests))


def reserve(served: Served, requests: Sequence[EngineRequest]) -> Reservation:
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


async def encode_within(
    text: str, param: str, tokenizer: Tokenizer, context: int
) -> tuple[int, ...]:
    """Token ids of a text, unless there are certainly more than the context holds."""
    least = -(-len(text.encode()) // tokenizer.longest_token)
    if least > context:
        raise bad_request(
            f"{_spoken(param)} has {len(text)} characters, at least {least} tokens; the model's "
            f"context is {context}. Shorten it",
            param,
            "context_length_exceeded",
        )
    if len(text) > THREAD_CHARACTERS:
        return tuple(await asyncio.to_thread(encode_text, text, tokenizer, param))
    return tuple(encode_text(text, tokenizer, param))


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
            logit_bias=logit_bias(body.logit_bias),
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


def logit_bias(biases: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings; ours are ids."""
    for key in biases:
        if not TOKEN_ID.fullmatch(key):
            raise bad_request(
                f"logit_bias has the key {clip(key)!r}; keys are token ids", "logit_bias"
            )
    return {int(key): bias for key, bias in biases.items()}


def _positions(positions: PositionChoice, length: int) -> tuple[int, ...]:
    match positions:
        case "last":
            return (length - 1,)
        case "all":
            return tuple(range(length))
        case PositionRange():
            found = tuple(range(length)[positions.start : positions.to])
            if not found:
                raise bad_request(
                    f"positions from {positions.start} to {positions.to} of a prompt of {length} "
                    "tokens are none; `to` is the first position left out",
                    "positions",
                )
            return found
        case _:
            return chosen("positions", positions, length, f"the prompt has {length} tokens")


def _check_sequences(count: int, param: str, served: Served) -> None:
    settings = served.settings
    if count > settings.max_sequences:
        raise bad_request(
            f"the request has {count} sequences (prompts times n); {settings.max_sequences} are "
            "allowed in one. Send less, or raise --max-sequences",
            param,
        )
    if count > served.slots + settings.max_queue:
        raise bad_request(
            f"the request has {count} sequences (prompts times n); {served.slots} slots and a "
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


def _spoken(param: str) -> str:
    """A text of a body, in a sentence."""
    return "the prompt" if param == "prompt" else f"one of {param}"


def deadline_of(timeout: float | None, served: Served) -> float | None:
    return None if timeout is None else served.engine.now() + timeout
