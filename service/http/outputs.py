"""OutputsWriter: rows of prompts as JSON, .npy or safetensors, written while they are computed.

An array whose first axis is the positions is written row by row. Arrays with another order of axes,
and several arrays of one prompt, are held for one prompt at a time, within the budget of all such
replies (`service/models/reply_budget.py`).
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from logitd.model.inference.engine.events import OutputsChunk
from logitd.model.inference.engine.requests import OutputsRequest
from logitd.model.operations.operation import Listing, NamedArray, Operation, Outputs, RowObject
from logitd.service.errors import bad_request
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
from logitd.service.http.envelope import checkpoint_headers, checkpoint_name, envelope
from logitd.service.http.negotiation import JSON, NPY
from logitd.service.http.reader import OutputsReader, paced
from logitd.service.models.context import RequestContext

PART_BYTES = 2**14
"""JSON objects written at once; the event loop runs in between."""


async def respond(
    operation: Operation, plan: Outputs, media_type: str, context: RequestContext
) -> Response:
    """The response, once the first rows are there; a client that leaves ends the requests."""
    if media_type == NPY and plan.not_npy is not None:
        raise bad_request(*plan.not_npy)
    writer = OutputsWriter(operation.reply_id, plan, media_type, context)
    await context.unless_gone(writer.start())
    return sse.StreamedResponse(
        writer.pieces(),
        on_end=writer.end,
        write_timeout=context.model.settings.slow_reader_timeout,
        media_type=media_type,
        headers=checkpoint_headers(context.checkpoint),
    )


class OutputsWriter:
    """One reply: its reader, and memory for the arrays of its largest prompt if they are held."""

    def __init__(
        self, reply_id: str, plan: Outputs, media_type: str, context: RequestContext
    ) -> None:
        self._reply_id = reply_id
        self._plan = plan
        self._media_type = media_type
        self._context = context
        self._listing = plan.listing if media_type == JSON else None
        self._held = 0 if self._row_by_row else self._check_held()
        context.model.reply_budget.take(self._held)
        try:
            self._reader = OutputsReader(plan.requests, context)
        except BaseException:
            self._give_back()
            raise

    async def start(self) -> None:
        """Wait for the first rows; whatever ends this call before ends the requests."""
        started = False
        try:
            await self._reader.start()
            started = True
        finally:
            if not started:
                self.end()

    def end(self) -> None:
        """Nobody reads any more."""
        self._reader.end()
        self._give_back()

    def pieces(self) -> AsyncIterator[bytes]:
        """The reply's body."""
        return self._json() if self._media_type == JSON else self._file()

    @property
    def _row_by_row(self) -> bool:
        """Whether rows are written in the order in which they are computed."""
        if self._listing is not None:
            return True
        arrays = self._plan.arrays
        return len(arrays) == 1 and len(arrays[0].shapes[0]) == 2 and not self._plan.wrapped_in

    def _check_held(self) -> int:
        """Elements of the largest prompt; a dtype of half the size counts half."""
        sizes = [
            sum(_held_elements(array, index, self._plan) for array in self._plan.arrays)
            for index in range(len(self._plan.requests))
        ]
        self._context.subject.check_array(sum(sizes))
        return max(sizes)

    def _give_back(self) -> None:
        self._context.model.reply_budget.give_back(self._held)
        self._held = 0

    # Files

    async def _file(self) -> AsyncIterator[bytes]:
        """An .npy or safetensors file."""
        yield self._file_head()
        index = 0
        async for _, chunks in self._reader.prompts():
            if self._row_by_row:
                async for chunk in chunks:
                    for part in byte_parts(encoded(chunk.rows, self._plan.dtype)):
                        yield part
            else:
                for array in await self._gather(index, chunks):
                    for part in byte_parts(array):
                        yield part
            index += 1

    def _file_head(self) -> bytes:
        """All of a file up to the bytes of its arrays. With several prompts every name ends in its
        prompt's index: `logits.0`. `token_ids` and `positions` of all prompts come first."""
        plan = self._plan
        if self._media_type == NPY:
            return npy_header(plan.arrays[0].shapes[0], plan.dtype)
        many = len(plan.requests) > 1
        specs, integers = [], []
        for index, request in enumerate(plan.requests):
            for name in ("token_ids", "positions"):
                values = getattr(request, name)
                specs.append(TensorSpec(_suffixed(name, index, many), "int64", (len(values),)))
                integers.append(np.array(values, dtype="<i8").tobytes())
        for index in range(len(plan.requests)):
            for array in plan.arrays:
                name = _suffixed(array.name, index, many)
                specs.append(TensorSpec(name, array.dtype or plan.dtype, array.shapes[index]))
        named = checkpoint_name(self._context.checkpoint).items()
        metadata = {f"checkpoint_{key}": str(value) for key, value in named}
        return safetensors_header(specs, {**metadata, **plan.members}) + b"".join(integers)

    async def _gather(self, index: int, chunks: AsyncIterator[OutputsChunk]) -> list[Array]:
        """The arrays of the prompt that is being computed."""
        plan = self._plan
        arrays = [_empty(array, index, plan) for array in plan.arrays]
        by_position = [  # views: the engine's order of axes
            np.moveaxis(array, of.position_axis, 0)
            for array, of in zip(arrays, plan.arrays, strict=True)
        ]
        filled = 0
        async for chunk in chunks:
            end, parts = filled + len(chunk.positions), plan.parts(index, chunk.rows)
            for view, part, of in zip(by_position, parts, plan.arrays, strict=True):
                view[filled:end] = part if of.dtype else encoded(part, plan.dtype)
            filled = end
        return arrays

    # JSON

    async def _json(self) -> AsyncIterator[bytes]:
        """The reply, prompt by prompt."""
        plan, context = self._plan, self._context
        head = {
            **envelope(self._reply_id, context.model.name, context.checkpoint),
            **plan.members,
        }
        if plan.arrays:
            head["dtype"] = plan.dtype
        yield orjson.dumps(head)[:-1] + b',"prompts":['
        index = 0
        async for request, chunks in self._reader.prompts():
            yield (b"," if index else b"") + self._prompt_head(index, request)
            if self._row_by_row:
                comma = b""
                async for chunk in chunks:
                    async for part in paced(self._rows(chunk, comma), self._context):
                        yield part
                    comma = b","
                yield b"]}"
            else:
                arrays = await self._gather(index, chunks)
                async for part in paced(self._arrays(arrays), self._context):
                    yield part
            index += 1
        yield b"]}"

    def _prompt_head(self, index: int, request: OutputsRequest) -> bytes:
        """A prompt's JSON up to its rows or arrays."""
        head: dict[str, Any] = {"index": index, "token_ids": list(request.token_ids)}
        opening = ""
        if self._plan.arrays:
            head["positions"] = list(request.positions)
        if self._row_by_row:
            listing = self._listing
            member = self._plan.arrays[0].name if listing is None else listing.member
            opening = f'"{member}":['
        elif self._plan.wrapped_in is not None:
            opening = f'"{self._plan.wrapped_in}":{{'
        return orjson.dumps({**head, **self._plan.facts})[:-1] + b"," + opening.encode()

    def _rows(self, chunk: OutputsChunk, comma: bytes) -> Iterator[bytes]:
        """The rows of a chunk, one by one."""
        if self._listing is None:
            for row in encoded(chunk.rows, self._plan.dtype):
                yield comma + b"".join(json_parts(row))
                comma = b","
            return
        rows = encoded(chunk.rows, self._plan.dtype)
        for position, row in zip(chunk.positions, rows, strict=True):
            yield from _row_parts(self._listing, position, row, comma)
            comma = b","

    def _arrays(self, arrays: Sequence[Array]) -> Iterator[bytes]:
        """A prompt's JSON from its arrays on."""
        comma = ""
        for named, array in zip(self._plan.arrays, arrays, strict=True):
            parts = json_parts(array)
            yield f'{comma}"{named.name}":'.encode() + next(parts)
            yield from parts
            comma = ","
        yield b"}" if self._plan.wrapped_in is None else b"}}"


def _row_parts(listing: Listing, position: int, row: Any, comma: bytes) -> Iterator[bytes]:
    """A row as a JSON list or object, some items at a time."""
    made: RowObject = listing.row(position, row)
    part, closing = bytearray(comma), b"]"
    if made.head is None:
        part += b"["
    else:
        part += orjson.dumps(made.head)[:-1] + f',"{made.member}":['.encode()
        closing = b"]}"
    separator = b""
    for item in made.items:
        part += separator + orjson.dumps(item)
        separator = b","
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part = bytearray()
    yield bytes(part) + closing


def _suffixed(name: str, index: int, many: bool) -> str:
    return f"{name}.{index}" if many else name


def _dtype(array: NamedArray, plan: Outputs) -> str:
    """The dtype in which an array is stored; bfloat16 as the bits of it."""
    dtype = array.dtype or plan.dtype
    return "<u2" if dtype == "bfloat16" else dtype


def _empty(array: NamedArray, index: int, plan: Outputs) -> Array:
    return np.empty(array.shapes[index], dtype=_dtype(array, plan))


def _held_elements(array: NamedArray, index: int, plan: Outputs) -> int:
    """Elements of an array as float32, so float16 counts half."""
    item = ITEM_BYTES[array.dtype or plan.dtype]
    return -(-prod(array.shapes[index]) * item // ITEM_BYTES["float32"])
