"""POST /v1/completions: generation in OpenAI's shape."""

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.operations import generate
from logitd.model.operations.operation import Completions
from logitd.service.access.auth import note_user
from logitd.service.http import completions as replies
from logitd.service.http import sse
from logitd.service.http.body import body_of, described_by
from logitd.service.http.endpoint import make_plan
from logitd.service.models.state import Ready
from logitd.service.openai.completions import CompletionFormat
from logitd.service.openai.schemas import CompletionReply, CompletionRequest
from logitd.service.openai.translate import constraint_names, native_completion, param_names

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
        response_format = CompletionFormat(body, prompts, context.model.name, context.checkpoint)
        generation = replies.Generation(plan, context, response_format)
    return await replies.respond(generation, context, stream=native.stream)
