"""POST /logits: logits as JSON, npy or safetensors, written as they are computed."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.service.api.requests.body import body_of, described_by
from logitd.service.api.requests.resolve import resolve_logits
from logitd.service.api.responses.tensors.logits import LogitsWriter
from logitd.service.api.responses.tensors.negotiation import RESPONSES, negotiate
from logitd.service.api.responses.tensors.stream import stream_tensors
from logitd.service.core.state import Ready
from logitd.service.schemas.tensors import LogitsReply, LogitsRequest

router = APIRouter()

LogitsBody = Annotated[LogitsRequest, Depends(body_of(LogitsRequest))]


@router.post(
    "/logits",
    response_model=LogitsReply,
    responses=RESPONSES,
    openapi_extra=described_by(LogitsRequest),
    summary="Logits",
    tags=["outputs"],
)
async def logits(body: LogitsBody, models: Ready, request: Request) -> Response:
    """Logits of the chosen positions: row i predicts the token after position i.

    `Accept: application/x-npy` gives one prompt's rows as an array (positions, columns) for
    `numpy.load`, `application/vnd.safetensors` those of all prompts; otherwise JSON."""
    served = models.of(body.model)
    media_type = negotiate(request, len(body.prompts), body.dtype, top_k=body.top_k)
    requests = await resolve_logits(body, served, request)
    writer = LogitsWriter(body, requests, served)
    return await stream_tensors(writer, media_type, served, request)
