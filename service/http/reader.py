"""OutputsReader: rows at positions of prompts, as the engine computes them.

Prompts are computed one after another, a chunk of positions at a time. The engine computes at most
one chunk ahead of what was taken, so a reply is written while it is computed and never held as a
whole. Not here: how rows are written (`outputs.py`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from logitd.model.inference.engine.events import FinishEvent, OutputsChunk
from logitd.model.inference.engine.requests import OutputsRequest
from logitd.service.engine.submission import Submission
from logitd.service.errors import raise_failure
from logitd.service.models.context import RequestContext

PAUSE_FACTOR = 4
"""Pause after a part, as a multiple of the time that it took to make."""


class OutputsReader:
    """The rows of several prompts, in order.

    Once the status is sent, an error can only break the connection off. So room for all prompts is
    reserved at once, and the first rows are awaited (`start`) before anything is written.
    """

    def __init__(self, requests: Sequence[OutputsRequest], context: RequestContext) -> None:
        self.requests = tuple(requests)
        self._reservation = context.reserve(self.requests)
        self._submission = self._reservation.submit_next()
        self._rows = read_rows(self._submission)
        self._first: OutputsChunk | None = None

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

    async def prompts(self) -> AsyncIterator[tuple[OutputsRequest, AsyncIterator[OutputsChunk]]]:
        """Each request with its chunks, which are to be taken before the next request."""
        for index, request in enumerate(self.requests):
            if index:
                self._submission = self._reservation.submit_next()
                self._rows = read_rows(self._submission)
            yield request, self._pieces()

    async def _pieces(self) -> AsyncIterator[OutputsChunk]:
        if self._first is not None:
            yield self._first
            self._first = None
        async for piece in self._rows:
            yield piece


async def paced(parts: Iterator[bytes], context: RequestContext) -> AsyncIterator[bytes]:
    """Parts that keep the interpreter busy while they are made, such as JSON. While tokens are
    decoded, a pause follows each part, PAUSE_FACTOR times as long as the part took: the engine's
    thread needs the interpreter too."""
    while True:
        began = time.perf_counter()
        part = next(parts, None)
        if part is None:
            return
        took = time.perf_counter() - began
        yield part
        if context.model.engine.decoding:
            await asyncio.sleep(PAUSE_FACTOR * took)


async def read_rows(submission: Submission) -> AsyncIterator[OutputsChunk]:
    """The chunks of a submission's requests, each in the order of its positions.

    Raises ApiError when a request ended before its last row, EngineStopped when the engine failed.
    """
    while not submission.finished:
        for event in await submission.take():
            if isinstance(event, OutputsChunk):
                yield event
            elif isinstance(event, FinishEvent):
                raise_failure(event)
