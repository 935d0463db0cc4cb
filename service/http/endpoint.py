"""Endpoint: one route for every operation: parse, plan, admit, submit, answer.

The order is the same for all of them. Room in the queue is held while texts are encoded, so a full
queue answers 429 first. What an operation means is in `model/operations/`; how each form of reply
is written, in the modules beside this one.
"""

import asyncio
from collections.abc import Generator, Iterable
from functools import partial
from typing import Annotated, Any, cast

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.inference.errors import InvalidRequest
from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.body import RequestBody
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import (
    Compile,
    Completions,
    Compute,
    Operation,
    Outputs,
    Plan,
    Planning,
    Record,
    Series,
)
from logitd.service.errors import ERRORS
from logitd.service.http import completions, negotiation, outputs, series, sse
from logitd.service.http.body import body_of, described_by
from logitd.service.http.envelope import envelope, server_timing
from logitd.service.models.context import RequestContext
from logitd.service.models.state import Ready

THREAD_CHARACTERS = 8_192
"""Longer texts are encoded in a thread, off the event loop: up to 20 ms, with GPT-NeoX's runs of
spaces as added tokens."""
THREAD_INTERVENTIONS = 256
"""More interventions, counted per prompt, are resolved in a thread."""

# Nothing waits for a vocabulary: neither for room in a queue nor for a deadline.
UNQUEUED = {status: error for status, error in ERRORS.items() if status not in (429, 504)}
RESPONSES = {
    "record": ERRORS,
    "listing": ERRORS,
    "outputs": negotiation.RESPONSES,
    "completions": sse.RESPONSES,
    "series": sse.RESPONSES,
    "vocabulary": UNQUEUED,
}


def router(operations: Iterable[Operation] = OPERATIONS) -> APIRouter:
    """The routes of operations."""
    routes = APIRouter()
    for operation in operations:
        routes.add_api_route(
            operation.path,
            endpoint_of(operation),
            methods=["POST"],
            name=operation.name,
            response_model=operation.reply,
            responses=RESPONSES[operation.form],
            openapi_extra=described_by(operation.body),
            summary=operation.summary,
            description=operation.description,
            tags=[operation.tag],
        )
    return routes


def endpoint_of(operation: Operation) -> Any:
    """The handler of an operation's route."""
    read = body_of(operation.body)

    async def endpoint(
        body: Annotated[Any, Depends(read)], models: Ready, request: Request
    ) -> Response:
        context = models.of(body.model, getattr(body, "timeout", None))
        media_type = negotiation.JSON
        if operation.form == "outputs":
            media_type = negotiation.negotiate(request, body)
        if operation.form == "vocabulary":
            return await context.unless_gone(_look_up(operation, body, context))
        plan = await make_plan(operation.plan(body, context.subject), body, context)
        match plan:
            case Record():
                return await _record(operation, plan, context)
            case Outputs():
                return await outputs.respond(operation, plan, media_type, context)
            case Completions():
                generation = completions.Generation(plan, context)
                return await completions.respond(generation, context, stream=body.stream)
            case Series():
                return await series.respond(operation, plan, context, stream=body.stream)

    return endpoint


async def make_plan(planning: Planning, body: RequestBody, context: RequestContext) -> Plan:
    """Run a plan, with what it needs computed or compiled first. Raises InvalidRequest, and
    QueueFull before any text is encoded."""
    sequences, param = body.queued
    in_thread = _is_slow(body) or not context.subject.tokenizer.cuts_in_time
    try:
        with context.model.admission.hold(sequences, param, context.caller):
            step = await _advance(planning, None, in_thread=in_thread)
            while isinstance(step, Compile):
                constraints = context.model.constraints
                compiling = constraints.compiled(step.source, step.sequences, context.caller)
                constraint = await context.unless_gone(compiling)
                step = await _advance(planning, constraint, in_thread=in_thread)
        while isinstance(step, Compute):
            try:
                computed = await context.compute(step.requests, more=True)
            except InvalidRequest as error:
                step = planning.throw(error)  # it names the field that asked for them
            else:  # which may be much
                step = await _advance(planning, computed, in_thread=True)
    finally:
        planning.close()
    return cast(Plan, step)


async def _advance(planning: Planning, answer: Any, *, in_thread: bool) -> Any:
    """What a plan yields next, or the finished plan."""
    if in_thread:
        return await asyncio.to_thread(_next, planning, answer)
    return _next(planning, answer)


def _next(planning: Generator[Any, Any, Plan], answer: Any) -> Any:
    try:
        return planning.send(answer)
    except StopIteration as stop:
        return stop.value


def _is_slow(body: RequestBody) -> bool:
    changes = len(getattr(body, "interventions", ())) * body.queued[0]
    return body.characters > THREAD_CHARACTERS or changes > THREAD_INTERVENTIONS


async def _record(operation: Operation, plan: Record, context: RequestContext) -> Response:
    """A JSON object, once everything is computed. It may list thousands of tokens: it is written in
    a thread, so that streams go on."""
    computed = await context.compute(plan.requests)
    content = await asyncio.to_thread(_write_record, operation, plan, computed, context)
    headers = server_timing(computed.finishes)
    return Response(content, media_type="application/json", headers=headers)


def _write_record(
    operation: Operation, plan: Record, computed: Computed, context: RequestContext
) -> bytes:
    head = envelope(operation.reply_id, context.model.name, context.checkpoint)
    return orjson.dumps({**head, **plan.reply(computed)})


async def _look_up(operation: Operation, body: Any, context: RequestContext) -> Response:
    """A reply made of the vocabulary alone. Long texts are processed one at a time: for a moment
    each takes memory many times its size, and other endpoints need threads too."""
    plan = cast(Record, _next(operation.plan(body, context.subject), None))
    write = partial(_write_record, operation, plan, Computed(), context)
    if body.characters <= THREAD_CHARACTERS:
        content = await asyncio.to_thread(write)
    else:
        async with context.request.app.state.service.long_texts:
            content = await asyncio.to_thread(write)
    return Response(content, media_type="application/json")
