"""POST /attributions: which tokens and which parts of the model a logit hangs on."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.inference.attribution.task import Attribution, AttributionTask
from logitd.model.inference.engine.requests import AttributionRequest
from logitd.model.text.tokenizer import Tokenizer
from logitd.service.api.requests.attributions import resolve_attributions
from logitd.service.api.requests.body import body_of, described_by, unless_gone
from logitd.service.api.responses.text import envelope, server_timing, token_json
from logitd.service.core.errors import ERRORS
from logitd.service.core.gather import Gathered, gather
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.core.state import Ready
from logitd.service.schemas.attributions import AttributionsReply, AttributionsRequest

router = APIRouter()

AttributionsBody = Annotated[AttributionsRequest, Depends(body_of(AttributionsRequest))]


@router.post(
    "/attributions",
    response_model=AttributionsReply,
    responses=ERRORS,
    openapi_extra=described_by(AttributionsRequest),
    summary="What a logit hangs on",
    tags=["outputs"],
)
async def attributions(body: AttributionsBody, models: Ready, request: Request) -> Response:
    """The gradient of a token's logit, or of the difference of two, with respect to the vector of
    each token of the prompt, times that vector, at the prompt or along a path from a baseline; and
    what each head, bias and MLP adds to it by itself. Other requests go on meanwhile: a step
    computes one block of one prompt."""
    served = models.of(body.model)
    requests = await resolve_attributions(body, served)
    computed = await unless_gone(request, gather(served.session.submit(requests)))
    # In a thread: it describes each token of every prompt.
    reply = await asyncio.to_thread(_reply, requests, computed, served)
    return Response(
        orjson.dumps(reply),
        media_type="application/json",
        headers=server_timing(computed.finishes),
    )


def _reply(
    requests: Sequence[AttributionRequest], computed: Gathered, served: Served
) -> dict[str, Any]:
    """The AttributionsReply."""
    tokenizer = served.checkpoint.tokenizer
    prompts = [
        {
            "index": index,
            "token_ids": request.token_ids,
            "position": request.task.position,
            **_attribution_json(
                computed.attributions[request.request_id],
                request.token_ids,
                request.task,
                tokenizer,
            ),
        }
        for index, request in enumerate(requests)
    ]
    return {**envelope(new_id("attributions"), served.checkpoint), "prompts": prompts}


def _attribution_json(
    attribution: Attribution,
    token_ids: Sequence[int],
    task: AttributionTask,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    path = attribution.integrated_gradients
    by_method = {
        "gradient_times_input": attribution.gradient_times_input,
        "integrated_gradients": None if path is None else path.values,
    }
    tokens = [token_json(tokenizer, token_id) for token_id in token_ids]
    for method, values in by_method.items():
        if values is not None:
            for token, value in zip(tokens, values, strict=True):
                token[method] = value
    minus = None
    if attribution.minus_id is not None:
        minus = {**token_json(tokenizer, attribution.minus_id), "logit": attribution.minus_logit}
    result: dict[str, Any] = {
        "token": {**token_json(tokenizer, attribution.token_id), "logit": attribution.logit},
        "minus": minus,
        "value": attribution.target,
        "tokens": tokens,
    }
    if path is not None:
        result["integrated_gradients"] = {
            "steps": task.steps,
            "baseline": "zero" if task.baseline is None else task.baseline,
            "baseline_value": path.baseline_target,
            "sum": path.sum,
            "gap": path.gap,
        }
    if attribution.direct is not None:
        result["direct"] = {
            "parts": [
                {"stage": part.stage, "head": part.head, "value": part.value}
                for part in attribution.direct
            ],
            "sum": attribution.direct_sum,
        }
    return result
