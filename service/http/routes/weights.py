"""GET /weights: the weights of the served model, whole or in part, and the matrices of its heads.

They are read from the checkpoint's file in a thread, one reply at a time
(`model/checkpoint/stored_weights.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from logitd.model.checkpoint.checkpoint import CheckpointError, CheckpointInfo
from logitd.model.checkpoint.stored_weights import Part, StoredWeights, Weight, parse_part
from logitd.model.operations.body import DType
from logitd.model.operations.operation import checkpoint_name
from logitd.model.operations.prompts import clip
from logitd.service.errors import ApiError, bad_request, errors, not_found
from logitd.service.http import sse
from logitd.service.http.arrays import (
    ITEM_BYTES,
    Array,
    TensorSpec,
    byte_parts,
    encoded,
    json_parts,
    npy_header,
    safetensors_header,
)
from logitd.service.http.envelope import checkpoint_headers, checkpoint_metadata
from logitd.service.http.negotiation import ARRAYS, JSON, NPY, RESPONSES, negotiate
from logitd.service.http.query import KNOWN_QUERY, PlainInt
from logitd.service.http.reader import paced
from logitd.service.http.schemas import WeightsReply
from logitd.service.models.context import RequestContext
from logitd.service.models.state import AskedModel, Ready, State

router = APIRouter(dependencies=[KNOWN_QUERY])


async def _at_step(
    models: Ready,
    model: AskedModel = None,
    step: Annotated[
        PlainInt | None,
        Query(
            ge=0, description="Step of the run, of a server with --history. Absent: the served one."
        ),
    ] = None,
) -> RequestContext:
    return await models.at(model, step)


AtStep = Annotated[RequestContext, Depends(_at_step)]


@dataclass(frozen=True, slots=True)
class _Form:
    """The parts of a request that determine the media type of its reply."""

    dtype: str
    prompts: tuple[()] = ()


@router.get(
    "/weights",
    response_model=WeightsReply,
    responses=errors(400, 401, 404, 409, 429, 431, 503),
    summary="The names and shapes of the weights",
    tags=["outputs"],
)
async def weights(context: AtStep, state: State) -> dict[str, Any]:
    """Every tensor of the checkpoint, then the derived tensors: embedding `W_E`, unembedding `W_U`,
    and the matrices of each head, by which row vectors are multiplied (`x @ W`)."""
    async with state.weight_reads.turn(context.caller):
        checkpoint = context.checkpoint  # a reload may replace the context's checkpoint meanwhile
        listed = await asyncio.to_thread(_list, checkpoint)
    return {
        "model": context.model.name,
        "checkpoint": checkpoint_name(checkpoint),
        "weights": [
            {"name": each.name, "shape": list(each.shape), "dtype": each.dtype} for each in listed
        ],
    }


@router.get(
    "/weights/{name}",
    responses={**RESPONSES, **errors(404, 409)},
    summary="A weight, or a part of it",
    tags=["outputs"],
)
async def weight(
    request: Request,
    name: str,
    context: AtStep,
    state: State,
    part: Annotated[
        str | None,
        Query(
            alias="slice",
            max_length=200,
            description='Indices for each axis, as in NumPy but in steps of 1: "3,:,0:64". '
            "Absent: the whole weight.",
        ),
    ] = None,
    dtype: Annotated[DType, Query()] = "float32",
) -> Response:
    """One of the weights that GET /weights lists, as in the checkpoint's file, before quantization;
    float32 unless `dtype` says otherwise.

    With `Accept: application/vnd.safetensors` or `application/x-npy`, the reply is the array;
    otherwise it is JSON."""
    media_type = negotiate(request, _Form(dtype), ARRAYS)
    async with state.weight_reads.turn(context.caller):
        checkpoint = context.checkpoint  # a reload may replace the context's checkpoint meanwhile
        chosen, shape = await asyncio.to_thread(_choose, checkpoint, name, part)
        elements = -(-prod(shape) * ITEM_BYTES[dtype] // 4)
        context.subject.check_array(elements)
        context.model.reply_budget.take(elements)
        try:
            values = await asyncio.to_thread(_read, checkpoint, name, chosen)
            array = (await asyncio.to_thread(encoded, values, dtype)).reshape(shape)
        except BaseException:
            context.model.reply_budget.give_back(elements)
            raise
    return sse.StreamedResponse(
        _pieces(array, name, dtype, media_type, checkpoint, context),
        on_end=lambda: context.model.reply_budget.give_back(elements),
        write_timeout=context.model.settings.slow_reader_timeout,
        media_type=media_type,
        headers=checkpoint_headers(checkpoint),
    )


async def _pieces(
    array: Array,
    name: str,
    dtype: DType,
    media_type: str,
    checkpoint: CheckpointInfo,
    context: RequestContext,
) -> AsyncIterator[bytes]:
    if media_type != JSON:
        if media_type == NPY:
            yield npy_header(array.shape, dtype)
        else:
            metadata = checkpoint_metadata(checkpoint)
            yield safetensors_header([TensorSpec(name, dtype, array.shape)], metadata)
        for part in byte_parts(array):
            yield part
        return
    head = orjson.dumps(
        {
            "model": context.model.name,
            "checkpoint": checkpoint_name(checkpoint),
            "name": name,
            "dtype": dtype,
            "shape": list(array.shape),
        }
    )
    yield head[:-1] + b',"values":'
    async for part in paced(_json_values(array), context):
        yield part
    yield b"}"


def _json_values(array: Array) -> Iterator[bytes]:
    if array.ndim:
        yield from json_parts(array)
    else:
        yield orjson.dumps(float(array))


# Run in a thread


def _list(checkpoint: CheckpointInfo) -> list[Weight]:
    with _opened(checkpoint) as stored:
        return stored.all()


def _choose(
    checkpoint: CheckpointInfo, name: str, text: str | None
) -> tuple[Part, tuple[int, ...]]:
    """The chosen part of a weight, and the shape of the reply."""
    with _opened(checkpoint) as stored:
        shape = stored.shape_of(name)
    if shape is None:
        message = f"there is no weight {clip(name)!r}; GET /weights lists those of the model"
        raise not_found(message, "name")
    try:
        return parse_part(text, shape)
    except ValueError as error:
        raise bad_request(str(error), "slice") from error


def _read(checkpoint: CheckpointInfo, name: str, part: Part) -> Array:
    with _opened(checkpoint) as stored:
        try:
            return stored.read(name, part)
        except CheckpointError as error:
            raise _conflict(error) from error


def _opened(checkpoint: CheckpointInfo) -> StoredWeights:
    try:
        return StoredWeights(checkpoint)
    except CheckpointError as error:
        raise _conflict(error) from error


def _conflict(error: CheckpointError) -> ApiError:
    return ApiError(409, "conflict_error", str(error), None, "checkpoint_changed")
