"""POST /hidden_states: the residual stream, layer by layer."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from model.inference.engine.requests import HiddenStates
from service.core.state import Ready
from service.requests.body import body_of, described_by
from service.requests.prompts import prompt_ids
from service.requests.resolve import chosen, outputs_request
from service.responses.tensors.array_reply import Wanted, answer
from service.responses.tensors.negotiation import RESPONSES, check_form, negotiate
from service.schemas.tensors import HiddenStatesReply, HiddenStatesRequest

router = APIRouter()

HiddenStatesBody = Annotated[HiddenStatesRequest, Depends(body_of(HiddenStatesRequest))]


@router.post(
    "/hidden_states",
    response_model=HiddenStatesReply,
    responses=RESPONSES,
    openapi_extra=described_by(HiddenStatesRequest),
    summary="Hidden states",
    tags=["numbers"],
)
async def hidden_states(body: HiddenStatesBody, served: Ready, request: Request) -> Response:
    """The residual stream (layers, positions, d_model): 0 is after the embeddings, i after block i,
    before the final norm.

    `Accept: application/x-npy` gives one prompt's array, `application/vnd.safetensors` those of
    all prompts; otherwise JSON."""
    served.check_model(body.model)
    media_type = negotiate(request.headers.get("accept", "*/*"))
    prompts = await prompt_ids(body.prompt, served)
    check_form(media_type, body.dtype, len(prompts))
    config = served.checkpoint.config
    states = config.n_layer + 1
    layers = chosen("layers", body.layers, states, f"there are {states} hidden states")
    wanted = HiddenStates(layers=layers)
    requests = [
        outputs_request(ids, body.positions, wanted, served, timeout=body.timeout)
        for ids in prompts
    ]
    shapes = [(len(layers), len(one.positions), config.d_model) for one in requests]
    array = Wanted("hidden_states", shapes, position_axis=1, facts={"layers": list(layers)})
    return await answer(array, requests, body.dtype, media_type, served, request)
