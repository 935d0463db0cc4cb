"""OutputsReader: rows at positions of prompts, as the engine computes them.

Prompts are computed one after another, a chunk of positions at a time. The engine computes at most
one chunk ahead of the reader, so a reply is written while it is computed and never held as a whole.
`outputs.py` writes the rows.
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
"""Length of the pause after a part, as a multiple of the time that making the part took."""


class OutputsReader:
    """The rows of several prompts, in order.

    Once the status is sent, an error can only break the connection off. So the constructor reserves
    room for all prompts, and `start` waits for the first rows before anything is written.
    """

    def __init__(self, requests: Sequence[OutputsRequest], context: RequestContext) -> None:
        self._requests = tuple(requests)
        self._session = context.session
        self._session.reserve(self._requests)
        self._submission = self._session.submit_next()
        self._rows = read_rows(self._submission)
        self._first: OutputsChunk | None = None

    async def start(self) -> None:
        """Wait for the first rows. If this call fails, the caller calls `end`."""
        self._first = await anext(self._rows)

    def end(self) -> None:
        """End the prompts that have not been read."""
        self._submission.abort()
        self._session.close()

    async def prompts(
        self,
    ) -> AsyncIterator[tuple[int, OutputsRequest, AsyncIterator[OutputsChunk]]]:
        """The index and request of each prompt with its chunks, which the caller reads before the
        next prompt."""
        for index, request in enumerate(self._requests):
            if index:
                self._submission = self._session.submit_next()
                self._rows = read_rows(self._submission)
            yield index, request, self._pieces()

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

    Raises ApiError if a request ends before its last row, EngineStopped if the engine fails.
    """
    while not submission.finished:
        for event in await submission.take():
            if isinstance(event, OutputsChunk):
                yield event
            elif isinstance(event, FinishEvent):
                raise_failure(event)
