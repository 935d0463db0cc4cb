"""The endpoints of OpenAI's API: completions, chat completions and the served models."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.operations import generate
from logitd.model.operations.operation import Completions, checkpoint_name
from logitd.service.errors import errors
from logitd.service.http import completions as replies
from logitd.service.http import sse
from logitd.service.http.body import body_of, described_by
from logitd.service.http.endpoint import make_plan
from logitd.service.http.negotiation import negotiate
from logitd.service.models.context import ModelChoice, RequestContext
from logitd.service.models.served import ServedModel
from logitd.service.models.state import Ready
from logitd.service.openai.chat import ChatFormat, chat_prompt
from logitd.service.openai.chat_schemas import ChatReply, ChatRequest
from logitd.service.openai.completions import CompletionFormat
from logitd.service.openai.schemas import CompletionReply, CompletionRequest, Model, ModelList
from logitd.service.openai.translate import (
    Constraint,
    constraint_of,
    native_chat,
    native_completion,
    param_names,
)

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/completions",
    response_model=CompletionReply,
    responses=sse.RESPONSES,
    openapi_extra=described_by(CompletionRequest),
    summary="Generate text, as OpenAI's API does",
)
async def completions(
    body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest))],
    models: Ready,
    request: Request,
) -> Response:
    """Continue a prompt, with the tokens and logprobs that /generate returns for the same fields.

    `logprobs` are raw unless `logprobs_stage` says otherwise. With `stream`, the reply is a series
    of server-sent events, each with one choice, and then `[DONE]`."""
    context = await _context(body, models, request)

    def formatted(plan: Completions) -> CompletionFormat:
        prompts = [each.token_ids for each in plan.requests]
        return CompletionFormat(body, prompts, context.model.name, context.checkpoint)

    constraint = constraint_of(body)
    with param_names(constraint):
        native = native_completion(body, constraint)
        generation = await _begin(native, context, formatted, constraint)
    return await replies.respond(generation, context, stream=native.stream)


@router.post(
    "/v1/chat/completions",
    response_model=ChatReply,
    responses=sse.RESPONSES,
    openapi_extra=described_by(ChatRequest),
    summary="Answer in a conversation, as OpenAI's API does",
)
async def chat_completions(
    body: Annotated[ChatRequest, Depends(body_of(ChatRequest))], models: Ready, request: Request
) -> Response:
    """Convert the messages to token ids with the checkpoint's chat template, and continue these ids
    as /generate does. An answer ends at any special token. With `tools` and a `tool_choice` that
    requires a call, the answer is a call whose arguments fit the function's schema.

    With `stream`, the reply is a series of server-sent events: the role, pieces of the text or of
    the call's arguments, the finish reason, and then `[DONE]`."""
    context = await _context(body, models, request)
    constraint = constraint_of(body)
    with param_names(constraint, prompt="messages", logprobs="top_logprobs"):
        # Check the queue first, so that a full queue is reported before the template runs.
        with context.model.engine.admission.hold(body.n or 1, "n", context.caller):
            prompt = await context.in_thread(partial(chat_prompt, body, context.subject))
        native = native_chat(body, prompt, context.checkpoint.tokenizer, constraint)
        generation = await _begin(
            native,
            context,
            lambda _: ChatFormat(body, context.model.name, context.checkpoint),
            constraint,
        )
    return await replies.respond(generation, context, stream=native.stream)


async def _context(
    body: CompletionRequest | ChatRequest, models: ModelChoice, request: Request
) -> RequestContext:
    """The context of a request. Its log line shows the body's `user`."""
    if body.user:
        request.state.user = body.user
    negotiate(request, body)
    return await models.answering(body)


async def _begin(
    native: generate.GenerateRequest,
    context: RequestContext,
    formatted: Callable[[Completions], replies.ResponseFormat],
    constraint: Constraint | None,
) -> replies.Generation:
    """Plan and submit a native request. `formatted` creates the formatter of its replies.
    `constraint` is named in errors that occur while it generates."""
    planning = generate.plan(native, context.subject, clamp_max_tokens=True)
    plan = cast(Completions, await make_plan(planning, native, context))
    names = {} if constraint is None else {constraint.native: constraint.field}
    return replies.Generation(plan, context, formatted(plan), names)


# GET /v1/models


@router.get("/v1/models", responses=errors(400, 401, 431, 503), summary="List the served models")
async def models(choice: Ready) -> ModelList:
    """The loaded models. The first one answers requests that name no model. /info also lists models
    that could not be loaded."""
    return ModelList(object="list", data=[_model(served) for served in choice.all.served])


@router.get(
    "/v1/models/{model:path}",  # a model may be named like any directory
    responses=errors(400, 401, 431, 503, 404),
    summary="One model",
)
async def one_model(model: str, choice: Ready) -> Model:
    """One served model by its name."""
    return _model(choice.all.find(model))


def _model(served: ServedModel) -> Model:
    checkpoint = served.checkpoint
    described: dict[str, Any] = {
        "id": served.name,
        "object": "model",
        "created": _timestamp(checkpoint.training.created),
        "owned_by": "logitd",
        "max_model_len": checkpoint.shape.context_length,
        "checkpoint": checkpoint_name(checkpoint),
    }
    return Model.model_validate(described)


def _timestamp(created: str) -> int:
    """Convert an ISO 8601 time to seconds since 1970; 0 for any other text."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return 0
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())
