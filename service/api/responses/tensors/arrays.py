"""ArrayWriter: replies with arrays of each prompt that cannot be written row by row: one in which
positions are an inner axis, such as hidden states (layers, positions, d_model), or several arrays.

The engine gives them position by position, a file needs them layer by layer and array by array. So
the arrays of the prompt that is being computed are held in memory, within the budget of all such
replies
(`service/core/reply_budget.py`).
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import orjson

from logitd.model.inference.engine.events import OutputsChunk
from logitd.model.inference.engine.requests import OutputsRequest
from logitd.service.api.responses.tensors.encoding import (
    ITEM_BYTES,
    Array,
    DType,
    byte_parts,
    encoded,
    json_parts,
    npy_header,
)
from logitd.service.api.responses.tensors.negotiation import NPY, SAFETENSORS
from logitd.service.api.responses.tensors.reader import OutputsReader, paced
from logitd.service.api.responses.tensors.safetensors import tensor_file_head
from logitd.service.api.responses.text import envelope
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served


@dataclass(frozen=True, slots=True)
class NamedArray:
    """An array of each prompt.

    name           in JSON and in safetensors
    shapes         its shape for each prompt
    position_axis  the axis of positions in it; the others are in the engine's order
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    position_axis: int = 0

    def row_elements(self, index: int) -> int:
        """Elements at one position of a prompt."""
        shape = self.shapes[index]
        return prod(shape[: self.position_axis] + shape[self.position_axis + 1 :])


@dataclass(frozen=True, slots=True)
class ArrayOutput:
    """What a reply gives of each prompt.

    kind    the reply's, as the prefix of its id
    arrays  one after the other in the engine's rows, and in the reply
    member  of a prompt's JSON that has the arrays as its members; None: the prompt itself has them
    facts   further members of a prompt's JSON
    """

    kind: str
    arrays: Sequence[NamedArray]
    member: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class ArrayWriter:
    """One request: its reader, and memory for the arrays of its largest prompt."""

    def __init__(
        self, output: ArrayOutput, requests: Sequence[OutputsRequest], dtype: DType, served: Served
    ) -> None:
        self._output = output
        self._dtype = dtype
        self._served = served
        sizes = [
            sum(_held_elements(array.shapes[index], dtype) for array in output.arrays)
            for index in range(len(requests))
        ]
        served.reply_budget.check_array(sum(sizes))
        self._held = max(sizes)
        served.reply_budget.take(self._held)
        try:
            self._reader = OutputsReader(requests, served)
        except BaseException:
            served.reply_budget.give_back(self._held)
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
        self._served.reply_budget.give_back(self._held)
        self._held = 0

    async def pieces(self, media_type: str) -> AsyncIterator[bytes]:
        """The reply's body."""
        output, requests = self._output, self._reader.requests
        if media_type == NPY:
            yield npy_header(output.arrays[0].shapes[0], self._dtype)
        elif media_type == SAFETENSORS:
            tensors = [(array.name, self._dtype, array.shapes) for array in output.arrays]
            yield tensor_file_head(self._served.checkpoint, tensors, requests, {})
        else:
            head = envelope(new_id(output.kind), self._served.checkpoint) | {"dtype": self._dtype}
            yield orjson.dumps(head)[:-1] + b',"prompts":['
        index = 0
        async for request, rows in self._reader.prompts():
            arrays = await self._gather(index, rows)
            if media_type in (NPY, SAFETENSORS):
                for array in arrays:
                    for part in byte_parts(array):
                        yield part
            else:
                yield (b"," if index else b"") + self._prompt_head(index, request)
                async for part in paced(self._json(arrays), self._served):
                    yield part
            index += 1
        if media_type not in (NPY, SAFETENSORS):
            yield b"]}"

    async def _gather(self, index: int, rows: AsyncIterator[OutputsChunk]) -> list[Array]:
        """All of the prompt that is being computed."""
        named = self._output.arrays
        dtype = "<u2" if self._dtype == "bfloat16" else self._dtype
        arrays: list[Array] = [np.empty(array.shapes[index], dtype=dtype) for array in named]
        by_position = [  # views: the engine's order of axes
            np.moveaxis(array, of.position_axis, 0) for array, of in zip(arrays, named, strict=True)
        ]
        ends = np.cumsum([array.row_elements(index) for array in named])
        filled = 0
        async for piece in rows:
            count = len(piece.positions)
            flat = encoded(piece.rows, self._dtype).reshape(count, -1)
            for view, part in zip(by_position, np.split(flat, ends[:-1], axis=1), strict=True):
                view[filled : filled + count] = part.reshape(count, *view.shape[1:])
            filled += count
        return arrays

    def _prompt_head(self, index: int, request: OutputsRequest) -> bytes:
        """A prompt's JSON up to its arrays."""
        head = {
            "index": index,
            "token_ids": list(request.token_ids),
            "positions": list(request.positions),
            **self._output.facts,
        }
        opening = "" if self._output.member is None else f'"{self._output.member}":{{'
        return orjson.dumps(head)[:-1] + b"," + opening.encode()

    def _json(self, arrays: Sequence[Array]) -> Iterator[bytes]:
        """A prompt's JSON from its arrays on."""
        comma = ""
        for named, array in zip(self._output.arrays, arrays, strict=True):
            parts = json_parts(array)
            yield f'{comma}"{named.name}":'.encode() + next(parts)
            yield from parts
            comma = ","
        yield b"}" if self._output.member is None else b"}}"


def _held_elements(shape: tuple[int, ...], dtype: DType) -> int:
    """What an array counts as in the budget: its elements as float32, so float16 counts half."""
    return -(-prod(shape) * ITEM_BYTES[dtype] // ITEM_BYTES["float32"])
