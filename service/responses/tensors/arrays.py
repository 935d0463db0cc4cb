"""ArrayWriter: replies with an array per prompt in which positions are an inner axis, such as
hidden states (layers, positions, d_model).

The engine gives them position by position, a file needs them layer by layer. So the array of the
prompt that is being computed is held in memory, within the budget of all such replies
(`service/core/reply_budget.py`).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import orjson

from model.inference.engine.events import OutputsChunk
from model.inference.engine.requests import OutputsRequest
from service.core.ids import new_id
from service.core.state import Served
from service.responses.tensors.encoding import (
    ITEM_BYTES,
    Array,
    DType,
    byte_parts,
    encoded,
    json_parts,
    npy_header,
)
from service.responses.tensors.negotiation import NPY, SAFETENSORS
from service.responses.tensors.reader import OutputsReader, paced
from service.responses.tensors.safetensors import tensor_file_head
from service.responses.text import envelope


@dataclass(frozen=True, slots=True)
class ArrayOutput:
    """What a reply gives of each prompt.

    name           of the array, in JSON and in safetensors
    shapes         the array's shape for each prompt
    position_axis  the axis of positions in it; the others are in the engine's order
    facts          further members of a prompt's JSON
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    position_axis: int
    facts: Mapping[str, Any]


class ArrayWriter:
    """One request: its reader, and memory for the largest of its arrays."""

    def __init__(
        self, output: ArrayOutput, requests: Sequence[OutputsRequest], dtype: DType, served: Served
    ) -> None:
        self._output = output
        self._dtype = dtype
        self._served = served
        sizes = [_held_elements(shape, dtype) for shape in output.shapes]
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
            yield npy_header(output.shapes[0], self._dtype)
        elif media_type == SAFETENSORS:
            tensors = [(output.name, self._dtype, output.shapes)]
            yield tensor_file_head(self._served.checkpoint, tensors, requests, {})
        else:
            head = envelope(new_id(output.name), self._served.checkpoint) | {"dtype": self._dtype}
            yield orjson.dumps(head)[:-1] + b',"prompts":['
        index = 0
        async for request, rows in self._reader.prompts():
            array = await self._gather(output.shapes[index], rows)
            if media_type in (NPY, SAFETENSORS):
                for part in byte_parts(array):
                    yield part
            else:
                yield (b"," if index else b"") + self._prompt_head(index, request)
                async for part in paced(json_parts(array), self._served):
                    yield part
                yield b"}"
            index += 1
        if media_type not in (NPY, SAFETENSORS):
            yield b"]}"

    async def _gather(self, shape: tuple[int, ...], rows: AsyncIterator[OutputsChunk]) -> Array:
        """The whole array of the prompt that is being computed."""
        axis = self._output.position_axis
        array: Array = np.empty(shape, dtype="<u2" if self._dtype == "bfloat16" else self._dtype)
        by_position = np.moveaxis(array, axis, 0)  # a view: the engine's order of axes
        filled = 0
        async for piece in rows:
            count = len(piece.positions)
            by_position[filled : filled + count] = encoded(piece.rows, self._dtype)
            filled += count
        return array

    def _prompt_head(self, index: int, request: OutputsRequest) -> bytes:
        """A prompt's JSON up to its array."""
        head = {
            "index": index,
            "token_ids": list(request.token_ids),
            "positions": list(request.positions),
            **self._output.facts,
        }
        return orjson.dumps(head)[:-1] + f',"{self._output.name}":'.encode()


def _held_elements(shape: tuple[int, ...], dtype: DType) -> int:
    """What an array counts as in the budget: its elements as float32, so float16 counts half."""
    return -(-prod(shape) * ITEM_BYTES[dtype] // ITEM_BYTES["float32"])
