"""The route that /hidden_states, /attention and /activations share: arrays of each prompt, in any
of the forms of `service/api/responses/tensors/negotiation.py`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from logitd.model.inference.engine.requests import OutputsRequest
from logitd.service.api.requests.body import body_of, described_by
from logitd.service.api.responses.tensors.arrays import ArrayOutput, ArrayWriter
from logitd.service.api.responses.tensors.negotiation import (
    NPY,
    RESPONSES,
    check_one_array,
    negotiate,
)
from logitd.service.api.responses.tensors.stream import stream_tensors
from logitd.service.core.models import Served
from logitd.service.core.state import Ready
from logitd.service.schemas.activations import ActivationsRequest
from logitd.service.schemas.tensors import AttentionRequest, HiddenStatesRequest

Body = TypeVar("Body", HiddenStatesRequest, AttentionRequest, ActivationsRequest)


def array_route(
    path: str,
    body_type: type[Body],
    reply_type: type[BaseModel],
    *,
    summary: str,
    description: str,
    resolve: Callable[[Body, Served, Request], Awaitable[list[OutputsRequest]]],
    output: Callable[[Sequence[OutputsRequest], Served], ArrayOutput],
) -> APIRouter:
    """A router with the endpoint POST `path`. `resolve` gives the engine's requests of a body,
    `output` the arrays that the reply makes of them."""

    async def endpoint(
        body: Annotated[Any, Depends(body_of(body_type))], models: Ready, request: Request
    ) -> Response:
        served = models.of(body.model)
        media_type = negotiate(request, len(body.prompts), body.dtype)
        requests = await resolve(body, served, request)
        arrays = output(requests, served)
        if media_type == NPY:
            check_one_array(len(arrays.arrays))
        writer = ArrayWriter(arrays, requests, body.dtype, served)
        return await stream_tensors(writer, media_type, served, request)

    router = APIRouter()
    router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        name=path.removeprefix("/"),
        response_model=reply_type,
        responses=RESPONSES,
        openapi_extra=described_by(body_type),
        summary=summary,
        description=description,
        tags=["outputs"],
    )
    return router
