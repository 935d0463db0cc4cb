"""POST /admin/reload: another checkpoint of the folder that is served from, for who operates it.

With a key of its own (`--admin-key`): those who may ask questions may not choose who answers. Names
of checkpoints beside the one that is served are taken, never paths.
"""

import hmac
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from logitd.service.access.auth import bearer_token
from logitd.service.errors import ERRORS, ApiError
from logitd.service.http.admin_schemas import ReloadReply, ReloadRequest
from logitd.service.http.body import body_of, described_by
from logitd.service.http.envelope import checkpoint_name
from logitd.service.models.reloader import ReloadError
from logitd.service.models.state import Ready, State

router = APIRouter(tags=["operations"])

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: ERRORS[status] for status in (400, 401, 403, 404, 408, 409, 413, 415, 431, 500, 503)
}
ReloadBody = Annotated[ReloadRequest, Depends(body_of(ReloadRequest))]


async def admin(state: State, request: Request) -> None:
    """Raise ApiError unless the request has the administrator's key."""
    key = state.settings.admin_key
    if key is None:
        raise ApiError(
            403, "permission_error", "this server has no administrator: start it with --admin-key"
        )
    sent = bearer_token(request.headers.raw) or b""
    if not hmac.compare_digest(sent, key.get_secret_value().encode()):
        raise ApiError(
            401,
            "authentication_error",
            "the administrator's key is needed here: send the header 'Authorization: Bearer KEY'",
            None,
            "invalid_admin_key",
        )


@router.post(
    "/admin/reload",
    dependencies=[Depends(admin)],  # before the body is read
    responses=RESPONSES,
    openapi_extra=described_by(ReloadRequest),
    summary="Serve another checkpoint",
)
async def reload(body: ReloadBody, models: Ready) -> ReloadReply:
    """Load a checkpoint beside the one that is served and let it take over, without a break. What
    was asked before is answered by the weights before. Without a name it is what the server was
    started to serve, as of now: of a run its best. A checkpoint that was named stays until another
    is named or none, also where a run is followed; the model's name stays. The reply comes when the
    swap is done; 409 says why the checkpoint before answers on. Of several models it is the one
    that `model` names."""
    served = models.of(body.model).model
    try:
        reloaded = await served.reloader.choose(body.checkpoint)
    except (OSError, ReloadError) as error:
        raise ApiError(409, "conflict_error", str(error), "checkpoint", "not_reloaded") from error
    return ReloadReply.model_validate(
        {
            "model": served.name,
            "checkpoint": checkpoint_name(reloaded.checkpoint),
            "swapped": reloaded.swapped,
        }
    )
