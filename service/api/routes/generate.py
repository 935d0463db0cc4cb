"""POST /generate: sampling, as one JSON reply or as a stream of events."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.service.api.requests.body import body_of, described_by
from logitd.service.api.requests.resolve import resolve_generation
from logitd.service.api.responses import sse
from logitd.service.api.responses.generation import Generation, NativeFormat, respond
from logitd.service.core.state import Ready
from logitd.service.schemas.generate import GenerateReply, GenerateRequest

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
async def generate(body: GenerateBody, models: Ready, request: Request) -> Response:
    """Continue a prompt. With `stream`, server-sent events: chunks like the reply whose choices
    hold what is new, then one with `usage` and `timings`, then `[DONE]`.

    The same request with the same seed gives the same tokens, whatever else is in the batch."""
    served = models.of(body.model)
    requests = await resolve_generation(body, served, request)
    submission = served.session.submit(requests)
    generation = Generation(body, requests, submission, served, NativeFormat())
    return await respond(request, generation, stream=body.stream)
