"""POST /generate: sampling, as one JSON reply or as a stream of events."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from service.core.errors import ERRORS
from service.core.state import Ready
from service.requests.body import body_of, described_by
from service.requests.prompts import prompt_ids
from service.requests.submit import deadline_of
from service.responses.generation import Native, accept, respond
from service.schemas.generate import GenerateReply, GenerateRequest

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
    deadline = deadline_of(body.timeout, served)
    prompts = await prompt_ids(body.prompt, served, body.n)
    generation = await accept(body, prompts, served, request, Native(), deadline)
    return await respond(request, generation, stream=body.stream)
