"""LensWriter: the reply of /lens, written while it is computed: some layers of a position at a
time, so that neither a reply nor a position of many layers and tokens is held as a whole."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from logitd.model.inference.engine.events import OutputsChunk
from logitd.model.inference.engine.requests import Lens, OutputsRequest
from logitd.model.inference.sampling.lens import read_lens
from logitd.service.api.responses.tensors.reader import OutputsReader, paced
from logitd.service.api.responses.text import envelope, token_json
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served

PART_TOKENS = 256
"""Tokens that are turned into JSON at once, or those of a layer where these are more: the event
loop runs in between."""


class LensWriter:
    """Writes the positions of each prompt in turn, as JSON."""

    def __init__(self, requests: Sequence[OutputsRequest], served: Served) -> None:
        output = requests[0].output
        assert isinstance(output, Lens)
        self._lens = output
        self._served = served
        self._reader = OutputsReader(requests, served)

    async def start(self) -> None:
        """Wait for the first rows; whatever ends this call before ends the requests."""
        await self._reader.start()

    def end(self) -> None:
        """Nobody reads any more."""
        self._reader.end()

    async def pieces(self, media_type: str) -> AsyncIterator[bytes]:
        """The LensReply."""
        head = envelope(new_id("lens"), self._served.checkpoint)
        yield orjson.dumps(head)[:-1] + b',"prompts":['
        index = 0
        async for request, chunks in self._reader.prompts():
            prompt = {"index": index, "token_ids": list(request.token_ids)}
            yield (b"," if index else b"") + orjson.dumps(prompt)[:-1] + b',"positions":['
            comma = b""
            async for chunk in chunks:
                async for part in paced(self._positions_json(chunk, comma), self._served):
                    yield part
                comma = b","
            yield b"]}"
            index += 1
        yield b"]}"

    def _positions_json(self, chunk: OutputsChunk, comma: bytes) -> Iterator[bytes]:
        """The positions of a chunk, some layers at a time."""
        part, listed = bytearray(), 0
        for position, rows in zip(chunk.positions, chunk.rows, strict=True):
            part += comma + b'{"position":%d,"layers":[' % position
            separator = b""
            for layer, numbers in zip(self._lens.layers, rows, strict=True):
                part += separator + orjson.dumps(self._layer_json(layer, numbers))
                separator = b","
                listed += self._lens.top_k + len(self._lens.token_ids)
                if listed >= PART_TOKENS:
                    yield bytes(part)
                    part, listed = bytearray(), 0
            part += b"]}"
            comma = b","
        yield bytes(part)

    def _layer_json(self, layer: int, numbers: Any) -> dict[str, Any]:
        """The LensLayer of a row."""
        named = self._lens.token_ids
        row = read_lens(numbers, self._lens.top_k, len(named))
        ranks = 1 + np.searchsorted(-row.top_logprobs, -row.top_logprobs)  # equals share one
        return {
            "layer": layer,
            "top": self._tokens_json(row.top_ids, row.top_logprobs, ranks),
            "tokens": self._tokens_json(named, row.logprobs, row.ranks),
            "entropy": row.entropy,
            "divergence": row.divergence,
        }

    def _tokens_json(self, ids: Any, logprobs: Any, ranks: Any) -> list[dict[str, Any]]:
        tokenizer = self._served.checkpoint.tokenizer
        return [
            {
                **token_json(tokenizer, int(token_id)),
                "prob": float(np.exp(np.float64(logprob))),
                "logprob": float(logprob),
                "rank": int(rank),
            }
            for token_id, logprob, rank in zip(ids, logprobs, ranks, strict=True)
        ]
