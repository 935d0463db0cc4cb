"""GET /features and GET /features/{index}: the sparse autoencoders of a model, and one feature."""

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from logitd.model.inference.engine.validation import check_request
from logitd.model.operations.computed import Computed
from logitd.model.operations.features import described_feature, promotion_request, summary
from logitd.model.operations.operation import checkpoint_name
from logitd.model.operations.prompts import clip
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.features import Features
from logitd.service.errors import errors, not_found
from logitd.service.http.query import KNOWN_QUERY, PlainInt
from logitd.service.http.schemas import FeatureReply, FeaturesReply
from logitd.service.models.context import RequestContext
from logitd.service.models.state import Chosen, State

router = APIRouter(dependencies=[KNOWN_QUERY])

Sae = Annotated[
    str | None, Query(description="Name of an autoencoder of the model. Absent: the first one.")
]


@router.get(
    "/features",
    response_model=FeaturesReply,
    responses=errors(400, 401, 404, 431, 503),
    summary="The sparse autoencoders, and figures of all features of one of them",
    tags=["outputs"],
)
async def features(context: Chosen, state: State, sae: Sae = None) -> Response:
    """The autoencoders that the server was started with (`--sae`). For the one that `sae` names
    (default: the first), the reply also lists each feature's density, its strongest activation, and
    the token where that activation occurred. The lists are null if the file `features.safetensors`
    is missing. One reply is written at a time."""
    autoencoders = context.model.autoencoders
    names = {"model": context.model.name, "checkpoint": checkpoint_name(context.checkpoint)}
    chosen = _chosen(context, sae) if autoencoders or sae is not None else None

    def write() -> bytes:
        facts = summary(autoencoders, chosen, context.subject.tokenizer)
        return orjson.dumps({**names, **facts})

    async with state.feature_lists.turn(context.caller):
        content = await asyncio.to_thread(write)
    return Response(content, media_type="application/json")


@router.get(
    "/features/{index}",
    response_model=FeatureReply,
    responses=errors(400, 401, 404, 429, 431, 503, 504),
    summary="A feature: its examples, its density, and the logits that it promotes",
    tags=["outputs"],
)
async def feature(
    context: Chosen, index: Annotated[PlainInt, Path(description="Index from 0.")], sae: Sae = None
) -> dict[str, Any]:
    """The examples are the places where the feature was strongest in the text on which the
    autoencoder was measured. `promoted` and `suppressed` are the tokens whose logits the feature's
    row of the decoder raises and lowers most, through the final norm (with scale 1) and the head
    (without a softcap); null if the autoencoder's stage is not as wide as the residual stream."""
    chosen = _chosen(context, sae)
    if not 0 <= index < chosen.count:
        raise not_found(
            f"feature {index} does not exist; {chosen.name} has {chosen.count} features (0 "
            f"to {chosen.count - 1})",
            "index",
        )
    stored, subject = context.model.autoencoders[chosen], context.subject
    assert isinstance(subject.config, GPTConfig)
    request, computed = promotion_request(stored, index, subject.config), Computed()
    if request is not None:
        check_request(request, subject.config)
        computed = await context.compute([request])
    return {
        "model": context.model.name,
        "checkpoint": checkpoint_name(context.checkpoint),
        **described_feature(
            chosen, stored, index, request, computed, subject.tokenizer, subject.config
        ),
    }


def _chosen(context: RequestContext, name: str | None) -> Features:
    """The features of the autoencoder with this name (None: the first one). Raises ApiError
    (404)."""
    known = [*context.model.autoencoders]
    found = next((each for each in known if name in (None, each.name)), None)
    if found is not None:
        return found
    there = ", ".join(each.name for each in known)
    message = (
        f"the model has no autoencoder {clip(name or '')!r}; it has {there}"
        if known
        else f"{context.model.name} is served without a sparse autoencoder: start the server with "
        "--sae NAME=DIR"
    )
    raise not_found(message, "sae")
