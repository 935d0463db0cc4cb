"""POST /lens: what the model would say if it stopped after each layer."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.service.api.requests.body import body_of, described_by
from logitd.service.api.requests.resolve import resolve_lens
from logitd.service.api.responses.lens import LensWriter
from logitd.service.api.responses.tensors.negotiation import JSON
from logitd.service.api.responses.tensors.stream import stream_tensors
from logitd.service.core.errors import ERRORS
from logitd.service.core.state import Ready
from logitd.service.schemas.lens import LensReply, LensRequest

router = APIRouter()

LensBody = Annotated[LensRequest, Depends(body_of(LensRequest))]


@router.post(
    "/lens",
    response_model=LensReply,
    responses=ERRORS,
    openapi_extra=described_by(LensRequest),
    summary="What it would say after each layer",
    tags=["outputs"],
)
async def lens(body: LensBody, models: Ready, request: Request) -> Response:
    """The final norm and the head on the residual stream after each layer: the likeliest next
    tokens, probability and rank of named ones, the entropy, and the divergence of the model's own
    answer, which is the last layer's."""
    served = models.of(body.model)
    requests = await resolve_lens(body, served, request)
    return await stream_tensors(LensWriter(requests, served), JSON, served, request)
