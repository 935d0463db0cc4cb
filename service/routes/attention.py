"""POST /attention: how much each position looks at each before it, by layer and head."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from model.inference.engine.requests import AttentionWeights
from service.core.state import Ready
from service.requests.body import body_of, described_by
from service.requests.prompts import prompt_ids
from service.requests.resolve import chosen, outputs_request
from service.responses.tensors.array_reply import Wanted, answer
from service.responses.tensors.negotiation import RESPONSES, check_form, negotiate
from service.schemas.tensors import AttentionReply, AttentionRequest

router = APIRouter()

AttentionBody = Annotated[AttentionRequest, Depends(body_of(AttentionRequest))]


@router.post(
    "/attention",
    response_model=AttentionReply,
    responses=RESPONSES,
    openapi_extra=described_by(AttentionRequest),
    summary="Attention weights",
    tags=["numbers"],
)
async def attention(body: AttentionBody, served: Ready, request: Request) -> Response:
    """Causal attention weights (layers, heads, positions, tokens); each row sums to 1, and what a
    position does not see is 0.

    `Accept: application/x-npy` gives one prompt's array, `application/vnd.safetensors` those of
    all prompts; otherwise JSON."""
    served.check_model(body.model)
    media_type = negotiate(request.headers.get("accept", "*/*"))
    prompts = await prompt_ids(body.prompt, served)
    check_form(media_type, body.dtype, len(prompts))
    config = served.checkpoint.config
    layers = chosen("layers", body.layers, config.n_layer, f"there are {config.n_layer} layers")
    heads = chosen("heads", body.heads, config.n_head, f"there are {config.n_head} heads")
    wanted = AttentionWeights(layers=layers, heads=heads)
    requests = [
        outputs_request(ids, body.positions, wanted, served, timeout=body.timeout)
        for ids in prompts
    ]
    shapes = [(len(layers), len(heads), len(one.positions), len(one.token_ids)) for one in requests]
    facts = {"layers": list(layers), "heads": list(heads)}
    array = Wanted("attention", shapes, position_axis=2, facts=facts)
    return await answer(array, requests, body.dtype, media_type, served, request)
