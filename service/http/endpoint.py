"""Endpoint: the generic route of all operations. It parses a body, makes the plan, submits the
requests and sends the reply.

Room in the queue is reserved before any text is encoded, so a full queue answers 429 quickly.
`model/operations/` defines the operations; the other modules of this folder write the replies.
"""

from collections.abc import AsyncIterator, Iterable
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
    envelope,
)
from logitd.service.errors import ERRORS
from logitd.service.http import completions, negotiation, outputs, series, sse
from logitd.service.http.arrays import PART_BYTES
from logitd.service.http.body import BODY_BYTES, body_of, described_by
from logitd.service.http.envelope import server_timing
from logitd.service.models.context import RequestContext
from logitd.service.models.state import Ready
from logitd.service.models.turns import CallerTurns
from logitd.service.threads import to_thread_until_done

THREAD_BYTES = 256
"""A body up to this size is planned on the event loop, which includes encoding its texts. This
takes at most 1.5 ms, even with GPT-NeoX's vocabulary, in which runs of spaces are added tokens.
Larger bodies are planned in a thread, which adds about 0.1 ms."""
LONG_BYTES = 8_192
"""Minimum size of a body, in bytes, with which a request that needs only the vocabulary counts as
long."""

# A request to the vocabulary neither waits in the queue nor has a deadline.
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
    read = body_of(operation.body)
    forms = negotiation.ARRAYS if operation.form == "outputs" else (negotiation.JSON,)

    async def endpoint(
        body: Annotated[Any, Depends(read)], models: Ready, request: Request
    ) -> Response:
        media_type = negotiation.negotiate(request, body, forms)
        context = await models.answering(body)
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
    """Run a plan's generator to its end. Compile the constraints and compute the requests that it
    yields. Raises InvalidRequest, and QueueFull before any text is encoded."""
    in_thread = _body_bytes(context) > THREAD_BYTES or not context.subject.tokenizer.cuts_in_time

    async def advance(answer: Any, *, in_thread: bool) -> Any:
        work = partial(_advance, planning, answer)
        return await context.in_thread(work) if in_thread else work()

    try:
        with context.model.engine.admission.hold(*body.queued, context.caller):
            step = await advance(None, in_thread=in_thread)
            while isinstance(step, Compile):
                constraints = context.model.constraints
                compiling = constraints.compiled(step.source, context.caller)
                constraint = await context.in_time(compiling)
                step = await advance(constraint, in_thread=in_thread)
        while isinstance(step, Compute):
            try:
                computed = await context.compute(step.requests, more=True)
            except InvalidRequest as error:
                step = planning.throw(error)  # the plan adds the name of the field
            else:  # in a thread: results may be large
                step = await advance(computed, in_thread=True)
    finally:
        planning.close()
    return cast(Plan, step)


def _advance(planning: Planning, answer: Any) -> Any:
    """Resume a plan's generator with `answer`. Returns what it yields next, or the finished
    plan."""
    try:
        return planning.send(answer)
    except StopIteration as stop:
        return stop.value


def _body_bytes(context: RequestContext) -> int:
    size: int = getattr(context.request.state, BODY_BYTES)
    return size


async def _record(operation: Operation, plan: Record, context: RequestContext) -> Response:
    budget = context.model.reply_budget
    budget.take(plan.held)
    try:
        computed = await context.compute(plan.requests)
        content = await _written(operation, plan, computed, context)
    except BaseException:
        budget.give_back(plan.held)
        raise
    headers = server_timing(computed.finishes)
    if not plan.held:
        return Response(content, media_type="application/json", headers=headers)
    return sse.StreamedResponse(  # a large reply counts until its client has read it
        _pieces(content),
        on_end=partial(budget.give_back, plan.held),
        write_timeout=context.model.settings.slow_reader_timeout,
        media_type="application/json",
        headers=headers,
    )


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PART_BYTES):
        yield content[start : start + PART_BYTES]


async def _look_up(operation: Operation, body: Any, context: RequestContext) -> Response:
    """Reply to a request that needs only the vocabulary. At most one long request and one short
    request are processed at a time, even if their clients leave; callers take turns. A long text
    briefly needs many times its size in memory, and more threads that run Python would delay the
    event loop."""
    state = context.request.app.state.service
    is_long = _body_bytes(context) > LONG_BYTES
    turns: CallerTurns = state.long_texts if is_long else state.short_texts
    async with turns.turn(context.caller):
        plan = _advance(operation.plan(body, context.subject), None)
        content = await _written(operation, plan, Computed(), context)
    return Response(content, media_type="application/json")


async def _written(
    operation: Operation, plan: Record, computed: Computed, context: RequestContext
) -> bytes:
    """Convert the reply to JSON in a thread, because it may list thousands of tokens, and streams
    must continue meanwhile."""

    def write() -> bytes:
        head = envelope(operation.reply_id, context.model.name, context.checkpoint)
        return orjson.dumps({**head, **plan.reply(computed)})

    return await to_thread_until_done(write)
