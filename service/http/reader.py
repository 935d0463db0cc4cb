"""OutputsReader: reads the outputs of prompts from the engine, a row for each position.

Prompts are computed one after another, one chunk of positions at a time, and the engine stays at
most one chunk ahead of the reader. So a reply is written while it is computed, and is never
entirely in memory. `outputs.py` writes the rows.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from logitd.model.inference.engine.events import OutputsChunk
from logitd.model.inference.engine.requests import OutputsRequest
from logitd.service.engine.submission import Submission
from logitd.service.models.context import RequestContext, events_of

PAUSE_FACTOR = 4
"""Length of the pause after each part of a reply, as a multiple of the time spent making it."""


class OutputsReader:
    """The rows of several prompts, in order.

    Once the status line is sent, an error can only be shown by closing the connection. So the
    constructor reserves room in the queue for all prompts, and `start` waits for the first rows
    before anything is written.
    """

    def __init__(self, requests: Sequence[OutputsRequest], context: RequestContext) -> None:
        self._requests = tuple(requests)
        self._session = context.session
        self._session.reserve(self._requests)
        self._submission = self._session.submit_next()
        self._rows = _rows(self._submission)
        self._first: OutputsChunk | None = None

    async def start(self) -> OutputsChunk:
        """Wait for the first rows, and return them. If this raises, the caller must call `end`."""
        first = self._first = await anext(self._rows)
        return first

    def end(self) -> None:
        """End the prompts that have not been read completely."""
        self._submission.abort()
        self._session.close()

    async def prompts(
        self,
    ) -> AsyncIterator[tuple[int, OutputsRequest, AsyncIterator[OutputsChunk]]]:
        """Yield the index, request and chunks of each prompt. Read all chunks of a prompt before
        requesting the next prompt."""
        for index, request in enumerate(self._requests):
            if index:
                self._submission = self._session.submit_next()
                self._rows = _rows(self._submission)
            yield index, request, self._pieces()

    async def _pieces(self) -> AsyncIterator[OutputsChunk]:
        if self._first is not None:
            yield self._first
            self._first = None
        async for piece in self._rows:
            yield piece


async def paced(parts: Iterator[bytes], context: RequestContext) -> AsyncIterator[bytes]:
    """Yield the parts of a reply, pausing after each part while the engine decodes tokens. Making a
    part, for example converting rows to JSON, keeps the interpreter busy, which the engine's thread
    needs too. A pause lasts PAUSE_FACTOR times as long as making the part."""
    while True:
        began = time.perf_counter()
        part = next(parts, None)
        if part is None:
            return
        took = time.perf_counter() - began
        yield part
        if context.model.engine.decoding:
            await asyncio.sleep(PAUSE_FACTOR * took)


async def _rows(submission: Submission) -> AsyncIterator[OutputsChunk]:
    """The chunks of a submission, in order of position. Raises the same errors as
    `events_of`."""
    async for event in events_of(submission):
        if isinstance(event, OutputsChunk):
            yield event
