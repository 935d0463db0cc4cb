"""POST /v1/completions: generation in OpenAI's shape."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from service.core.auth import note_user
from service.core.errors import ERRORS
from service.core.state import Ready
from service.openai.completions import CompletionShape
from service.openai.translate import native_completion, param_names
from service.requests.body import body_of, described_by
from service.requests.prompts import prompt_ids
from service.requests.submit import deadline_of
from service.responses.generation import accept, respond
from service.schemas.openai import CompletionReply, CompletionRequest

router = APIRouter()

CompletionBody = Annotated[CompletionRequest, Depends(body_of(CompletionRequest))]


@router.post(
    "/v1/completions",
    response_model=CompletionReply,
    responses=ERRORS,
    openapi_extra=described_by(CompletionRequest),
    summary="Generate text, as OpenAI's API does",
    tags=["openai"],
)
async def completions(body: CompletionBody, served: Ready, request: Request) -> Response:
    """Continue a prompt, with the tokens and logprobs that /generate gives for the same fields.

    `logprobs` are those of the model itself unless `logprobs_stage` says otherwise. With `stream`,
    server-sent events, a choice in each, then `[DONE]`."""
    note_user(request, body.user)
    served.check_model(body.model)
    native = native_completion(body)
    deadline = deadline_of(native.timeout, served)
    prompts = await prompt_ids(native.prompt, served, native.n)
    shape = CompletionShape(body, prompts, served.checkpoint)
    with param_names(json_schema="response_format"):
        generation = await accept(native, prompts, served, request, shape, deadline)
    return await respond(request, generation, stream=native.stream)
