"""POST /logits: raw logits, as JSON or as a NumPy array, written as they are computed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from model.distribution import largest
from model.engine.api import LogitsRequest as RowsRequest
from model.engine.api import RowsEvent
from model.tokenizer import Tokenizer
from service import sse
from service.async_engine import Submission
from service.errors import ApiError, bad_request
from service.openapi import ERRORS
from service.replies import checkpoint_headers, envelope, new_id, token_json
from service.requests import (
    bad_request_unless_ids,
    body_of,
    check_requests,
    described_by,
    logits_request,
    prompt_ids,
    submit,
)
from service.rows import as_dtype, npy_header, read_rows
from service.schemas import LogitsReply, LogitsRequest
from service.state import Ready, Served

router = APIRouter()

JSON, NPY = "application/json", "application/x-npy"

LogitsBody = Annotated[LogitsRequest, Depends(body_of(LogitsRequest))]


@router.post(
    "/logits",
    response_model=LogitsReply,
    responses={
        **ERRORS,
        200: {"content": {NPY: {"schema": {"type": "string", "format": "binary"}}}},
        406: ERRORS[400] | {"description": "`Accept` names no format of this endpoint"},
    },
    openapi_extra=described_by(LogitsRequest),
    summary="Raw logits",
    tags=["numbers"],
)
async def logits(body: LogitsBody, served: Ready, request: Request) -> Response:
    """Logits of the chosen positions: row i predicts the token after position i.

    `Accept: application/x-npy` gives one prompt's rows as an array (positions, columns) for
    `numpy.load`; otherwise JSON."""
    served.check_model(body.model)
    media_type = _negotiate(request.headers.get("accept", "*/*"))
    prompts = await prompt_ids(body.prompt, served)
    if body.token_ids is not None:
        bad_request_unless_ids("token_ids", body.token_ids, served)
    if media_type == NPY and len(prompts) > 1:
        raise bad_request(f"npy holds one array; the request has {len(prompts)} prompts", "prompt")
    if media_type == NPY and body.top_k is not None:
        raise bad_request("top_k has no place in npy; take JSON, or name token_ids", "top_k")
    check_requests(len(prompts), served)
    reply = LogitsWriter(body, prompts, served)
    return sse.StreamedResponse(
        reply.npy() if media_type == NPY else reply.json(),
        on_end=reply.abort,
        write_timeout=served.settings.slow_reader_timeout,
        media_type=media_type,
        headers=checkpoint_headers(served.checkpoint),
    )


class LogitsWriter:
    """Computes one prompt after the other and writes the rows as they come.

    Once the status is sent an error can only break the connection off, so what can be refused is
    refused before, and the first prompt is queued at once.
    """

    def __init__(self, body: LogitsRequest, prompts: list[tuple[int, ...]], served: Served) -> None:
        self._body = body
        self._served = served
        self._requests: list[RowsRequest] = [
            logits_request(
                ids, body.positions, served, columns=body.token_ids, timeout=body.timeout
            )
            for ids in prompts
        ]
        self._submission: Submission = submit(served, self._requests[:1])

    def abort(self) -> None:
        self._submission.abort()

    async def npy(self) -> AsyncIterator[bytes]:
        request = self._requests[0]
        config = self._served.checkpoint.config
        columns = config.vocab_size if request.columns is None else len(request.columns)
        dtype = np.dtype(self._body.dtype).newbyteorder("<")
        yield npy_header((len(request.positions), columns), dtype)
        async for piece in read_rows(self._submission):
            yield as_dtype(piece.rows, self._body.dtype).tobytes()

    async def json(self) -> AsyncIterator[bytes]:
        """The LogitsReply, a piece of rows at a time."""
        head = envelope(new_id("logits"), self._served.checkpoint)
        head |= {"stage": "raw", "dtype": self._body.dtype}
        yield orjson.dumps(head)[:-1] + b',"prompts":['
        for index, request in enumerate(self._requests):
            if index:
                self._submission = submit(self._served, [request])
            async for part in self._prompt_json(index, request):
                yield part
        yield b"]}"

    async def _prompt_json(self, index: int, request: RowsRequest) -> AsyncIterator[bytes]:
        columns = None if request.columns is None else list(request.columns)
        head: dict[str, Any] = {
            "index": index,
            "token_ids": list(request.token_ids),
            "positions": list(request.positions),
            "columns": columns,
        }
        member = "logits" if self._body.top_k is None else "top"
        empty = {"logits": None, "top": None}
        del empty[member]
        yield (b"," if index else b"") + orjson.dumps(head | empty)[:-1] + f',"{member}":['.encode()
        first = True
        async for piece in read_rows(self._submission):
            rows = await asyncio.to_thread(self._rows_json, piece)
            yield rows if first else b"," + rows
            first = False
        yield b"]}"

    def _rows_json(self, piece: RowsEvent) -> bytes:
        """Rows as JSON arrays with commas between them, without the outer brackets."""
        rows = as_dtype(piece.rows, self._body.dtype)
        if self._body.top_k is not None:
            tokenizer = self._served.checkpoint.tokenizer
            return orjson.dumps([_top(row, self._body.top_k, tokenizer) for row in rows])[1:-1]
        return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _top(row: Any, count: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [{**token_json(tokenizer, int(i)), "logit": float(row[i])} for i in largest(row, count)]


def _negotiate(accept: str) -> str:
    """The format to answer in: npy when it is named before JSON, JSON when anything is welcome."""
    for part in accept.split(","):
        media_type = part.partition(";")[0].strip().lower()
        if media_type == NPY:
            return NPY
        if media_type in (JSON, "application/*", "*/*", ""):
            return JSON
    raise ApiError(
        406,
        "invalid_request_error",
        f"Accept is {accept[:80]!r}; this endpoint gives {JSON} and {NPY}",
    )
