"""POST /v1/completions: generation in OpenAI's shape."""

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.operations import generate
from logitd.model.operations.operation import Completions
from logitd.service.api import completions as replies
from logitd.service.api import sse
from logitd.service.api.body import body_of, described_by
from logitd.service.api.endpoint import make_plan
from logitd.service.api.openai.completions import CompletionFormat
from logitd.service.api.openai.translate import constraint_names, native_completion, param_names
from logitd.service.core.auth import note_user
from logitd.service.core.state import Ready
from logitd.service.schemas.openai import CompletionReply, CompletionRequest

router = APIRouter()

CompletionBody = Annotated[CompletionRequest, Depends(body_of(CompletionRequest))]


@router.post(
    "/v1/completions",
    response_model=CompletionReply,
    responses=sse.RESPONSES,
    openapi_extra=described_by(CompletionRequest),
    summary="Generate text, as OpenAI's API does",
    tags=["openai"],
)
async def completions(body: CompletionBody, models: Ready, request: Request) -> Response:
    """Continue a prompt, with the tokens and logprobs that /generate gives for the same fields.

    `logprobs` are those of the model itself unless `logprobs_stage` says otherwise. With `stream`,
    server-sent events, a choice in each, then `[DONE]`."""
    note_user(request, body.user)
    context = models.of(body.model, body.timeout)
    with param_names(**constraint_names(body)):
        native = native_completion(body)
        planning = generate.plan(native, context.subject, clamp_max_tokens=True)
        plan = cast(Completions, await make_plan(planning, native, context))
        prompts = [engine_request.token_ids for engine_request in plan.requests]
        response_format = CompletionFormat(body, prompts, context.checkpoint)
        generation = replies.Generation(plan, context, response_format)
    return await replies.respond(generation, context, stream=native.stream)
