"""OutputsWriter: writes the outputs of prompts as JSON, .npy or safetensors while they are
computed.

An array whose first axis is the positions is written row by row. Other arrays, or several arrays of
one prompt, are kept in memory for one prompt at a time. A budget limits the memory of all such
replies together (`service/models/served.py`).
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from logitd.model.inference.engine.events import OutputsChunk
from logitd.model.inference.engine.requests import OutputsRequest
from logitd.model.operations.operation import (
    Listing,
    NamedArray,
    Operation,
    Outputs,
    envelope,
)
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
from logitd.service.http.envelope import checkpoint_headers, checkpoint_metadata
from logitd.service.http.negotiation import JSON, NPY
from logitd.service.http.reader import OutputsReader, paced
from logitd.service.models.context import RequestContext

PART_BYTES = 2**14
"""Approximate number of bytes of JSON objects written at a time. The event loop runs between two
parts."""


async def respond(
    operation: Operation, plan: Outputs, media_type: str, context: RequestContext
) -> Response:
    """Wait for the first rows and return the response. If the client leaves, its requests are
    aborted."""
    if media_type == NPY and plan.not_npy is not None:
        raise bad_request(*plan.not_npy)
    writer = OutputsWriter(operation.reply_id, plan, media_type, context)
    try:
        await context.unless_gone(writer.start())
    except BaseException:
        writer.end()
        raise
    return sse.StreamedResponse(
        writer.pieces(),
        on_end=writer.end,
        write_timeout=context.model.settings.slow_reader_timeout,
        media_type=media_type,
        headers=checkpoint_headers(context.checkpoint),
    )


class OutputsWriter:
    """Writes one reply. If arrays are kept in memory, reserves a share of the budget that is large
    enough for the largest prompt."""

    def __init__(
        self, reply_id: str, plan: Outputs, media_type: str, context: RequestContext
    ) -> None:
        self._reply_id = reply_id
        self._plan = plan
        self._media_type = media_type
        self._context = context
        self._listing = plan.listing if media_type == JSON else None
        self._by_row = self._listing is not None or (
            len(plan.arrays) == 1 and len(plan.arrays[0].shapes[0]) == 2 and not plan.wrapped_in
        )
        self._held = 0 if self._by_row else self._check_held()
        context.model.reply_budget.take(self._held)
        try:
            self.reader = OutputsReader(plan.requests, context)
        except BaseException:
            self._give_back()
            raise

    async def start(self) -> None:
        """Wait for the first rows, and check that they can be written. If this raises, the caller
        must call `end`."""
        first, plan = await self.reader.start(), self._plan
        if plan.dtype != "float32":
            for part, array in zip(plan.parts(0, first.rows), plan.arrays, strict=True):
                if not array.dtype:
                    encoded(part, plan.dtype)

    def end(self) -> None:
        """End the requests that are still running, and release the reply's share of the budget."""
        self.reader.end()
        self._give_back()

    def pieces(self) -> AsyncIterator[bytes]:
        return self._json() if self._media_type == JSON else self._file()

    def _check_held(self) -> int:
        """The size of the outputs of the largest prompt, as a number of float32 elements. Raises
        InvalidRequest if all prompts together have too many elements."""
        sizes = [
            sum(
                -(-prod(array.shapes[index]) * ITEM_BYTES[self._dtype(array)] // 4)
                for array in self._plan.arrays
            )
            for index in range(len(self._plan.requests))
        ]
        self._context.subject.check_array(sum(sizes))
        return max(sizes)

    def _give_back(self) -> None:
        self._context.model.reply_budget.give_back(self._held)
        self._held = 0

    def _dtype(self, array: NamedArray) -> str:
        return array.dtype or self._plan.dtype

    async def _gather(self, index: int, chunks: AsyncIterator[OutputsChunk]) -> list[Array]:
        plan = self._plan
        arrays = [
            # NumPy has no bfloat16: its bits are stored as uint16.
            np.empty(array.shapes[index], self._dtype(array).replace("bfloat16", "<u2"))
            for array in plan.arrays
        ]
        by_position = [  # views, in the engine's order of axes
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

    # Files

    async def _file(self) -> AsyncIterator[bytes]:
        yield self._file_head()
        async for index, _, chunks in self.reader.prompts():
            if self._by_row:
                async for chunk in chunks:
                    for part in byte_parts(encoded(chunk.rows, self._plan.dtype)):
                        yield part
            else:
                for array in await self._gather(index, chunks):
                    for part in byte_parts(array):
                        yield part

    def _file_head(self) -> bytes:
        """The beginning of a file, up to the bytes of its arrays. With several prompts, every name
        ends in the index of its prompt: `logits.0`. The arrays `token_ids` and `positions` of all
        prompts come first."""
        plan = self._plan
        if self._media_type == NPY:
            return npy_header(plan.arrays[0].shapes[0], plan.dtype)
        specs, integers = [], []
        suffixes = [f".{i}" for i in range(len(plan.requests))] if len(plan.requests) > 1 else [""]
        for suffix, request in zip(suffixes, plan.requests, strict=True):
            for name in ("token_ids", "positions"):
                values = getattr(request, name)
                specs.append(TensorSpec(name + suffix, "int64", (len(values),)))
                integers.append(np.array(values, dtype="<i8").tobytes())
        specs += [
            TensorSpec(array.name + suffix, self._dtype(array), array.shapes[index])
            for index, suffix in enumerate(suffixes)
            for array in plan.arrays
        ]
        metadata = {**checkpoint_metadata(self._context.checkpoint), **plan.members}
        return safetensors_header(specs, metadata) + b"".join(integers)

    # JSON

    async def _json(self) -> AsyncIterator[bytes]:
        plan, context = self._plan, self._context
        head = {
            **envelope(self._reply_id, context.model.name, context.checkpoint),
            **plan.members,
        }
        if plan.arrays:
            head["dtype"] = plan.dtype
        yield orjson.dumps(head)[:-1] + b',"prompts":['
        async for index, request, chunks in self.reader.prompts():
            yield (b"," if index else b"") + self._prompt_head(index, request)
            if self._by_row:
                comma = b""
                async for chunk in chunks:
                    async for part in paced(self._rows(chunk, comma), context):
                        yield part
                    comma = b","
                yield b"]}"
            else:
                arrays = await self._gather(index, chunks)
                async for part in paced(self._arrays(arrays), context):
                    yield part
        yield b"]}"

    def _prompt_head(self, index: int, request: OutputsRequest) -> bytes:
        plan = self._plan
        head: dict[str, Any] = {"index": index, "token_ids": list(request.token_ids)}
        if plan.arrays:
            head["positions"] = list(request.positions)
        opening = ""
        if self._by_row:
            member = plan.arrays[0].name if self._listing is None else self._listing.member
            opening = f'"{member}":['
        elif plan.wrapped_in is not None:
            opening = f'"{plan.wrapped_in}":{{'
        return orjson.dumps({**head, **plan.facts})[:-1] + b"," + opening.encode()

    def _rows(self, chunk: OutputsChunk, comma: bytes) -> Iterator[bytes]:
        """Yield the rows of a chunk one by one. `comma` is written before the first."""
        rows = encoded(chunk.rows, self._plan.dtype)
        for position, row in zip(chunk.positions, rows, strict=True):
            if self._listing is None:
                yield comma + b"".join(json_parts(row))
            else:
                yield from _row_parts(self._listing, position, row, comma)
            comma = b","

    def _arrays(self, arrays: Sequence[Array]) -> Iterator[bytes]:
        comma = ""
        for named, array in zip(self._plan.arrays, arrays, strict=True):
            parts = json_parts(array)
            yield f'{comma}"{named.name}":'.encode() + next(parts)
            yield from parts
            comma = ","
        yield b"}" if self._plan.wrapped_in is None else b"}}"


def _row_parts(listing: Listing, position: int, row: Any, comma: bytes) -> Iterator[bytes]:
    """Yield a row as a JSON list or object, a few items at a time."""
    part, closing = bytearray(comma), b"]"
    if listing.wrapped_in is None:
        part += b"["
    else:
        part += f'{{"position":{position},"{listing.wrapped_in}":['.encode()
        closing = b"]}"
    separator = b""
    for item in listing.items(row):
        part += separator + orjson.dumps(item)
        separator = b","
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part = bytearray()
    yield bytes(part) + closing
