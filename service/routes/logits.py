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
from service.errors import ApiError, bad_request, clip
from service.openapi import ERRORS
from service.replies import checkpoint_headers, envelope, new_id, token_json
from service.requests import (
    body_of,
    check_choice,
    described_by,
    logits_request,
    prompt_ids,
    reserve,
    submit_next,
    unless_gone,
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
    check_choice(body.token_ids, body.top_k, served)
    if media_type == NPY and len(prompts) > 1:
        raise bad_request(f"npy holds one array; the request has {len(prompts)} prompts", "prompt")
    if media_type == NPY and body.top_k is not None:
        raise bad_request("top_k has no place in npy; take JSON, or name token_ids", "top_k")
    reply = LogitsWriter(body, prompts, served)
    await unless_gone(request, reply.start())
    return sse.StreamedResponse(
        reply.npy() if media_type == NPY else reply.json(),
        on_end=reply.end,
        write_timeout=served.settings.slow_reader_timeout,
        media_type=media_type,
        headers=checkpoint_headers(served.checkpoint),
    )


class LogitsWriter:
    """Computes one prompt after the other and writes the rows as they come.

    Once the status is sent an error can only break the connection off. So the room of all prompts
    is taken at once, and the first rows are awaited (`start`) before anything is written.
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
        self._reservation = reserve(served, self._requests)
        self._submission = submit_next(self._reservation)
        self._rows = read_rows(self._submission)
        self._first: RowsEvent | None = None

    async def start(self) -> None:
        """Wait for the first rows; whatever ends this call before ends the request."""
        try:
            self._first = await anext(self._rows)
        finally:
            if self._first is None:
                self.end()

    def end(self) -> None:
        """Nobody reads any more."""
        self._submission.abort()
        self._reservation.release()

    async def npy(self) -> AsyncIterator[bytes]:
        request = self._requests[0]
        config = self._served.checkpoint.config
        columns = config.vocab_size if request.columns is None else len(request.columns)
        dtype = np.dtype(self._body.dtype).newbyteorder("<")
        yield npy_header((len(request.positions), columns), dtype)
        async for piece in self._pieces():
            yield as_dtype(piece.rows, self._body.dtype).tobytes()

    async def json(self) -> AsyncIterator[bytes]:
        """The LogitsReply, a piece of rows at a time."""
        head = envelope(new_id("logits"), self._served.checkpoint)
        head |= {"stage": "raw", "dtype": self._body.dtype}
        yield orjson.dumps(head)[:-1] + b',"prompts":['
        for index, request in enumerate(self._requests):
            if index:
                self._submission = submit_next(self._reservation)
                self._rows = read_rows(self._submission)
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
        comma = b""
        async for piece in self._pieces():
            rows = as_dtype(piece.rows, self._body.dtype)
            if self._body.top_k is None:
                yield comma + await asyncio.to_thread(_rows_json, rows)
                comma = b","
                continue
            for row in rows:  # one by one: a token takes a hundred bytes of JSON
                yield comma + await asyncio.to_thread(
                    _top_json, row, self._body.top_k, self._served.checkpoint.tokenizer
                )
                comma = b","
        yield b"]}"

    async def _pieces(self) -> AsyncIterator[RowsEvent]:
        """The pieces of the prompt that is being computed."""
        if self._first is not None:
            yield self._first
            self._first = None
        async for piece in self._rows:
            yield piece


def _rows_json(rows: Any) -> bytes:
    """Rows as JSON arrays with commas between them, without the outer brackets."""
    return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _top_json(row: Any, count: int, tokenizer: Tokenizer) -> bytes:
    """The largest logits of a row, with their tokens."""
    return orjson.dumps(
        [{**token_json(tokenizer, int(i)), "logit": float(row[i])} for i in largest(row, count)]
    )


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
        f"Accept is {clip(accept)!r}; this endpoint gives {JSON} and {NPY}",
    )
