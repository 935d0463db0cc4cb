"""Sweeping: the cells of a grid, computed a few at a time, and the reply that they make.

Cells are admitted as they come, beside everybody else's requests: a sweep of a thousand cells takes
a few places in the queue, and the rest of it waits here. While the queue is full it waits too.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from logitd.model.inference.engine.requests import OutputsRequest
from logitd.model.inference.sweep import Cell
from logitd.service.api.requests.sweep import ResolvedSweep
from logitd.service.api.responses import sse
from logitd.service.api.responses.text import envelope, token_json
from logitd.service.core.errors import EXPECTED, as_api_error
from logitd.service.core.gather import gather
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.engine.admission import QueueFull
from logitd.service.engine.submission import Submission

AT_ONCE = 8
"""Cells of one sweep in the queue or in the batch."""
FULL_SECONDS = 0.2
"""Pause before a cell is offered again to a queue that is full."""


class Sweeping:
    """One sweep: its first row is computed by `start`, its cells by whoever reads on. The values
    that it sets or adds are held until its end, within the budget of what replies hold."""

    def __init__(self, resolved: ResolvedSweep, served: Served) -> None:
        self._resolved = resolved
        self._served = served
        served.reply_budget.check_array(resolved.held_elements)
        served.reply_budget.take(resolved.held_elements)
        self._held = resolved.held_elements
        self._running: deque[tuple[Cell, OutputsRequest, Submission]] = deque()
        self._head: dict[str, Any] = {}

    async def start(self) -> None:
        """Compute the row without what varies: what goes wrong is still an error of its own."""
        resolved, served = self._resolved, self._served
        unchanged = resolved.unchanged
        try:
            computed = await gather(served.session.submit([unchanged], more=True))
        except BaseException:
            self.end()
            raise
        tokens = [token_json(served.checkpoint.tokenizer, i) for i in resolved.columns]
        self._head = {
            **envelope(new_id("sweep"), served.checkpoint),
            "token_ids": list(unchanged.token_ids),
            "token": tokens[0],
            "minus": tokens[1] if len(tokens) > 1 else None,
            "axes": [{"name": name, "values": list(at)} for name, at in resolved.grid.axes.items()],
            "unchanged": _cell_json(Cell(None, None, None), computed.rows[unchanged.request_id][0]),
        }

    async def reply(self) -> dict[str, Any]:
        """The SweepReply."""
        cells = [cell async for cell in self.cells()]
        shape = [len(places) for places in self._resolved.grid.axes.values()]
        grid = np.array([cell["value"] for cell in cells], dtype=np.float64).reshape(shape)
        return {**self._head, "cells": cells, "grid": grid.tolist()}

    async def events(self) -> AsyncIterator[bytes]:
        """The same as server-sent events: the head, then each cell."""
        yield sse.event(self._head)
        try:
            async for cell in self.cells():
                yield sse.event({"cell": cell})
        except EXPECTED as error:
            yield sse.event(as_api_error(error).body())
        yield sse.DONE

    async def cells(self) -> AsyncIterator[dict[str, Any]]:
        """The cells in their order, AT_ONCE of them under way."""
        waiting = self._resolved.requests()
        upcoming = next(waiting, None)
        try:
            while upcoming is not None or self._running:
                while upcoming is not None and len(self._running) < AT_ONCE:
                    if not await self._submit(*upcoming):
                        break
                    upcoming = next(waiting, None)
                cell, request, submission = self._running[0]
                computed = await gather(submission)
                self._running.popleft()
                yield _cell_json(cell, computed.rows[request.request_id][0])
        finally:
            self.end()

    def end(self) -> None:
        """Nobody reads any more."""
        for _, _, submission in self._running:
            submission.abort()
        self._running.clear()
        self._served.session.close()
        self._served.reply_budget.give_back(self._held)
        self._held = 0

    async def _submit(self, cell: Cell, request: OutputsRequest) -> bool:
        """Queue a cell. False where the queue is full and another of this sweep is under way."""
        while True:
            try:
                submission = self._served.session.submit([request], more=True)
            except QueueFull:
                if self._running:
                    return False
                await asyncio.sleep(FULL_SECONDS)
            else:
                self._running.append((cell, request, submission))
                return True


def _cell_json(cell: Cell, logits: Any) -> dict[str, Any]:
    """The SweepCell of a row of one or two logits."""
    logit, minus = float(logits[0]), float(logits[1]) if len(logits) > 1 else None
    return {
        "layer": cell.layer,
        "head": cell.head,
        "position": cell.position,
        "logit": logit,
        "minus_logit": minus,
        "value": logit if minus is None else logit - minus,
    }
