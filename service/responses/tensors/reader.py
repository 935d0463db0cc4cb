"""Rows: what the engine computes at the positions of prompts, as it comes.

Prompts are computed one after the other, each a piece of positions at a time, and the engine
computes the next piece but one only as they are taken: a reply is written while it is computed and
never held whole. In which bytes it is written is the business of `arrays.py` and the routes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from model.inference.engine.events import FinishEvent, OutputsChunk
from model.inference.engine.requests import OutputsRequest
from service.core.errors import from_finish, unavailable
from service.core.state import Served
from service.engine.submission import EngineStopped, Submission
from service.requests.submit import reserve, submit_next

PAUSE = 4


class OutputsReader:
    """The rows of several prompts, in order.

    Once the status is sent an error can only break the connection off. So the room of all prompts
    is taken at once, and the first rows are awaited (`start`) before anything is written.
    """

    def __init__(self, requests: Sequence[OutputsRequest], served: Served) -> None:
        self.requests = tuple(requests)
        self._reservation = reserve(served, list(requests))
        self._submission = submit_next(self._reservation)
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
        """Each request with its pieces, which are to be taken before the next request."""
        for index, request in enumerate(self.requests):
            if index:
                self._submission = submit_next(self._reservation)
                self._rows = read_rows(self._submission)
            yield request, self._pieces()

    async def _pieces(self) -> AsyncIterator[OutputsChunk]:
        if self._first is not None:
            yield self._first
            self._first = None
        async for piece in self._rows:
            yield piece


async def paced(parts: Iterator[bytes], served: Served) -> AsyncIterator[bytes]:
    """Parts whose making keeps the interpreter for itself (JSON does), with pauses PAUSE times as
    long as they took while somebody decodes: the engine's thread needs the interpreter too."""
    while True:
        began = time.perf_counter()
        part = next(parts, None)
        if part is None:
            return
        took = time.perf_counter() - began
        yield part
        if served.engine.decoding:
            await asyncio.sleep(PAUSE * took)


async def read_rows(submission: Submission) -> AsyncIterator[OutputsChunk]:
    """The pieces of a submission's requests, in the order of their positions each.

    Raises ApiError when a request ended before its last row.
    """
    while not submission.finished:
        try:
            events = await submission.take()
        except EngineStopped as error:
            raise unavailable(str(error)) from error
        for event in events:
            if isinstance(event, OutputsChunk):
                yield event
            elif isinstance(event, FinishEvent) and (failure := from_finish(event)) is not None:
                raise failure
