"""LogitsWriter: the reply of /logits in each of its forms, written while it is computed.

Rows come in the order of positions, so nothing but the chunk at hand is in memory; the `top_k` of a
safetensors file are held for one prompt at a time.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from logitd.model.inference.engine.events import OutputsChunk
from logitd.model.inference.engine.requests import OutputsRequest
from logitd.model.inference.sampling.distribution import largest
from logitd.service.api.responses.tensors.encoding import (
    byte_parts,
    encoded,
    json_parts,
    npy_header,
)
from logitd.service.api.responses.tensors.negotiation import NPY, SAFETENSORS
from logitd.service.api.responses.tensors.reader import OutputsReader, paced
from logitd.service.api.responses.tensors.safetensors import tensor_file_head
from logitd.service.api.responses.text import envelope, token_json
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.schemas.tensors import LogitsRequest


class LogitsWriter:
    """Writes the rows of each prompt in turn."""

    def __init__(self, body: LogitsRequest, requests: list[OutputsRequest], served: Served) -> None:
        self._body = body
        self._served = served
        self._tokenizer = served.checkpoint.tokenizer
        self._reader = OutputsReader(requests, served)

    async def start(self) -> None:
        """Wait for the first rows; whatever ends this call before ends the requests."""
        await self._reader.start()

    def end(self) -> None:
        """Nobody reads any more."""
        self._reader.end()

    def pieces(self, media_type: str) -> AsyncIterator[bytes]:
        """The reply's body."""
        if media_type == NPY:
            return self._npy()
        if media_type != SAFETENSORS:
            return self._json()
        return self._tensors() if self._body.top_k is None else self._top_tensors()

    async def _npy(self) -> AsyncIterator[bytes]:
        request = self._reader.requests[0]
        yield npy_header((len(request.positions), self._columns), self._body.dtype)
        async for part in self._row_bytes():
            yield part

    async def _tensors(self) -> AsyncIterator[bytes]:
        """`logits` (positions, columns), with the ids and positions of its rows."""
        yield tensor_file_head(
            self._served.checkpoint,
            [("logits", self._body.dtype, self._shapes(self._columns))],
            self._reader.requests,
            {"stage": self._body.stage},
        )
        async for part in self._row_bytes():
            yield part

    async def _top_tensors(self) -> AsyncIterator[bytes]:
        """`top_logits` and `top_ids` (positions, k); -inf and -1 behind those that are left."""
        count = self._body.top_k or 0
        yield tensor_file_head(
            self._served.checkpoint,
            [
                ("top_ids", "int64", self._shapes(count)),
                ("top_logits", self._body.dtype, self._shapes(count)),
            ],
            self._reader.requests,
            {"stage": self._body.stage},
        )
        async for request, pieces in self._reader.prompts():
            ids = np.full((len(request.positions), count), -1, dtype="<i8")
            values = np.full((len(request.positions), count), -np.inf, dtype=np.float32)
            filled = 0
            async for piece in pieces:
                for row in piece.rows:
                    best = _kept(row, count)
                    ids[filled, : len(best)] = best
                    values[filled, : len(best)] = row[best]
                    filled += 1
            for part in (*byte_parts(ids), *byte_parts(encoded(values, self._body.dtype))):
                yield part

    async def _row_bytes(self) -> AsyncIterator[bytes]:
        async for _, pieces in self._reader.prompts():
            async for piece in pieces:
                for part in byte_parts(encoded(piece.rows, self._body.dtype)):
                    yield part

    async def _json(self) -> AsyncIterator[bytes]:
        """The LogitsReply, a row at a time."""
        head = envelope(new_id("logits"), self._served.checkpoint)
        head |= {"stage": self._body.stage, "dtype": self._body.dtype}
        yield orjson.dumps(head)[:-1] + b',"prompts":['
        index = 0
        async for request, pieces in self._reader.prompts():
            yield (b"," if index else b"") + self._prompt_head(index, request)
            async for part in self._json_rows(pieces):
                yield part
            yield b"]}"
            index += 1
        yield b"]}"

    def _prompt_head(self, index: int, request: OutputsRequest) -> bytes:
        """A prompt's JSON up to the bracket that its rows follow."""
        columns = self._body.token_ids
        head: dict[str, Any] = {
            "index": index,
            "token_ids": list(request.token_ids),
            "positions": list(request.positions),
            "columns": columns,
        }
        member, other = ("logits", "top") if self._body.top_k is None else ("top", "logits")
        return orjson.dumps(head | {other: None})[:-1] + f',"{member}":['.encode()

    async def _json_rows(self, pieces: AsyncIterator[OutputsChunk]) -> AsyncIterator[bytes]:
        comma = b""
        async for piece in pieces:
            async for part in paced(self._rows_json(piece, comma), self._served):
                yield part
            comma = b","

    def _rows_json(self, piece: OutputsChunk, comma: bytes) -> Iterator[bytes]:
        """The rows of a piece, one by one."""
        for row in encoded(piece.rows, self._body.dtype):
            if self._body.top_k is None:
                yield comma + b"".join(json_parts(row))
            else:
                yield comma + self._top_json(row, self._body.top_k)
            comma = b","

    def _top_json(self, row: npt.NDArray[Any], count: int) -> bytes:
        """The largest logits of a row, with their tokens."""
        return orjson.dumps(
            [
                {**token_json(self._tokenizer, int(i)), "logit": float(row[i])}
                for i in _kept(row, count)
            ]
        )

    def _shapes(self, width: int) -> list[tuple[int, ...]]:
        return [(len(request.positions), width) for request in self._reader.requests]

    @property
    def _columns(self) -> int:
        chosen = self._body.token_ids
        return self._tokenizer.vocab_size if chosen is None else len(chosen)


def _kept(row: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """The `count` largest of a row, less those that processing dropped."""
    best = largest(row, count)
    return best[row[best] > -np.inf]
