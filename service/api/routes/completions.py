"""POST /v1/completions: generation in OpenAI's shape."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.service.api.openai.completions import CompletionFormat
from logitd.service.api.openai.translate import constraint_names, native_completion, param_names
from logitd.service.api.requests.body import body_of, described_by
from logitd.service.api.requests.resolve import resolve_generation
from logitd.service.api.responses import sse
from logitd.service.api.responses.generation import Generation, respond
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
    served = models.of(body.model)
    with param_names(**constraint_names(body)):
        native = native_completion(body)
        requests = await resolve_generation(native, served, request, fit=True)
        submission = served.session.submit(requests)
    prompts = [generation.token_ids for generation in requests]
    response_format = CompletionFormat(body, prompts, served.checkpoint)
    generation = Generation(native, requests, submission, served, response_format)
    return await respond(request, generation, stream=native.stream)
