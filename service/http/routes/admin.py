"""POST /admin/reload: serve another checkpoint from the same folder.

It needs the administrator's key (`--admin-key`), because ordinary clients must not choose the
weights. A checkpoint is given by its folder's name, never by a path.
"""

import hmac
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from logitd.model.operations.body import (
    CheckpointName,
    Examples,
    ModelName,
    ReplyBody,
    RequestBody,
)
from logitd.model.operations.operation import checkpoint_name
from logitd.service.access.auth import bearer_token
from logitd.service.engine.async_engine import ReloadError
from logitd.service.errors import ApiError, errors
from logitd.service.http.body import body_of, described_by
from logitd.service.models.state import Ready, State

router = APIRouter(tags=["operations"])


class ReloadRequest(RequestBody):
    """Another checkpoint to serve."""

    examples: ClassVar[Examples] = {
        "The checkpoint given when the server was started": {},
        "A checkpoint by its name": {"checkpoint": "step-000800"},
    }

    model: ModelName = None
    checkpoint: str | None = Field(
        None,
        max_length=256,
        description="Name of a checkpoint in the served run or folder. Absent: the one given "
        "when the server was started; for a run, its best checkpoint so far.",
    )


class ReloadReply(ReplyBody):
    model: str
    checkpoint: CheckpointName = Field(description="The checkpoint that is now served.")
    swapped: bool = Field(description="False if it was already served.")


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
            "the administrator's key is missing or wrong: send the header 'Authorization: Bearer "
            "KEY'",
            None,
            "invalid_admin_key",
        )


@router.post(
    "/admin/reload",
    dependencies=[Depends(admin)],  # before the body is read
    responses=errors(400, 401, 403, 404, 408, 409, 413, 415, 431, 500, 503),
    openapi_extra=described_by(ReloadRequest, required=False),
    summary="Serve another checkpoint",
)
async def reload(
    body: Annotated[ReloadRequest, Depends(body_of(ReloadRequest, required=False))], models: Ready
) -> ReloadReply:
    """Load a checkpoint alongside the served one, then switch without interruption. Requests
    received before the switch are answered by the old weights. Without a name, the checkpoint given
    at the start is loaded; for a run, its best checkpoint so far. A named checkpoint stays in use
    until the next reload, even if the server follows a run. The model's name stays the same. The
    reply is sent when the switch is complete. If the old checkpoint stays in use, the reply is a
    409 with the reason. `model` chooses one of several models."""
    served = models.of(body.model).model
    try:
        swapped = await served.reloader.choose(body.checkpoint)
    except ReloadError as error:
        raise ApiError(409, "conflict_error", str(error), "checkpoint", "not_reloaded") from error
    return ReloadReply(
        model=served.name,
        checkpoint=CheckpointName(**checkpoint_name(served.checkpoint)),
        swapped=swapped,
    )
