"""POST /generate: sampling, as one JSON reply or as a stream of events."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from service.core.state import Ready
from service.requests.body import body_of, described_by
from service.requests.resolve import resolve_generation
from service.responses import sse
from service.responses.generation import Generation, NativeFormat, respond
from service.schemas.generate import GenerateReply, GenerateRequest

router = APIRouter()

GenerateBody = Annotated[GenerateRequest, Depends(body_of(GenerateRequest))]


@router.post(
    "/generate",
    response_model=GenerateReply,
    responses=sse.RESPONSES,
    openapi_extra=described_by(GenerateRequest),
    summary="Generate text",
    tags=["generation"],
)
async def generate(body: GenerateBody, served: Ready, request: Request) -> Response:
    """Continue a prompt. With `stream`, server-sent events: chunks like the reply whose choices
    hold what is new, then one with `usage` and `timings`, then `[DONE]`.

    The same request with the same seed gives the same tokens, whatever else is in the batch."""
    served.check_model(body.model)
    requests = await resolve_generation(body, served, request)
    submission = served.engine.submit(requests)
    generation = Generation(body, requests, submission, served, NativeFormat())
    return await respond(request, generation, stream=body.stream)
