"""POST /sweep: an intervention in one place after another, as a grid."""

from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.service.api.requests.body import body_of, described_by, unless_gone
from logitd.service.api.requests.sweep import resolve_sweep
from logitd.service.api.responses import sse
from logitd.service.api.responses.sweep import Sweeping
from logitd.service.api.responses.text import checkpoint_headers
from logitd.service.core.state import Ready
from logitd.service.schemas.sweep import SweepReply, SweepRequest

router = APIRouter()

SweepBody = Annotated[SweepRequest, Depends(body_of(SweepRequest))]


@router.post(
    "/sweep",
    response_model=SweepReply,
    responses=sse.RESPONSES,
    openapi_extra=described_by(SweepRequest),
    summary="An intervention in one place after another",
    tags=["outputs"],
)
async def sweep(body: SweepBody, models: Ready, request: Request) -> Response:
    """Carry an intervention out in one layer, head or position after another, and give a token's
    logit each time, or the difference of two: ablate each head in turn, patch each layer and
    position in turn. With `stream`, an event with what is known before, `{"cell": ...}` for each
    cell as it is computed, then `[DONE]`."""
    served = models.of(body.model)
    resolved = await resolve_sweep(body, served, request)
    sweeping = Sweeping(resolved, served)
    await unless_gone(request, sweeping.start())
    if not body.stream:
        reply = await unless_gone(request, sweeping.reply())
        return Response(orjson.dumps(reply), media_type="application/json")
    return sse.StreamedResponse(
        sse.with_keep_alive(sweeping.events()),
        on_end=sweeping.end,
        write_timeout=served.settings.slow_reader_timeout,
        media_type=sse.MEDIA_TYPE,
        headers=checkpoint_headers(served.checkpoint),
        waits=True,
    )
