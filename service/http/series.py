"""Series: computes the many requests (jobs) of one reply, a few at a time.

Jobs are submitted gradually, so that other clients' requests can run between them. A sweep of a
thousand cells takes only a few places in the queue; its other cells wait here, even while the queue
is full.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.responses import Response

from logitd.model.operations.operation import Operation, Series, envelope
from logitd.service.engine.admission import Load, QueueFull
from logitd.service.engine.submission import Submission
from logitd.service.errors import EXPECTED, as_api_error, timed_out
from logitd.service.http import sse
from logitd.service.http.envelope import checkpoint_headers
from logitd.service.models.context import RequestContext, gather

AT_ONCE = 8
"""Maximum number of jobs of one series that are queued or running."""
FULL_SECONDS = 0.2
"""Seconds to wait before a job is submitted again after the queue was full."""


async def respond(
    operation: Operation, plan: Series, context: RequestContext, *, stream: bool
) -> Response:
    """A reply with all parts, or a stream with an event for each part."""
    running = RunningSeries(operation.reply_id, plan, context)
    if not stream:
        reply = await context.unless_gone(running.reply())
        return Response(reply, media_type="application/json")
    return sse.StreamedResponse(
        sse.with_keep_alive(running.events()),
        on_end=running.end,
        write_timeout=context.model.settings.slow_reader_timeout,
        media_type=sse.MEDIA_TYPE,
        headers=checkpoint_headers(context.checkpoint),
        waits=True,
    )


class RunningSeries:
    """The jobs of one reply. Some values are kept in memory for all jobs; they count against the
    reply budget until `end` is called."""

    def __init__(self, reply_id: str, plan: Series, context: RequestContext) -> None:
        self._plan = plan
        self._context = context
        self._head = {
            **envelope(reply_id, context.model.name, context.checkpoint),
            **plan.head,
        }
        self._running: deque[Submission] = deque()
        context.model.engine.admission.check_possible(Load(tokens=plan.tokens))
        context.model.reply_budget.take(plan.held)
        self._held = plan.held

    async def reply(self) -> bytes:
        """Return the whole reply as JSON. The conversion runs in a thread, because a grid may have
        thousands of cells."""
        parts = [part async for part in self.parts()]
        return await asyncio.to_thread(
            lambda: orjson.dumps({**self._head, **self._plan.members(parts)})
        )

    async def events(self) -> AsyncIterator[bytes]:
        yield sse.event(self._head)
        try:
            async for part in self.parts():
                yield sse.event({self._plan.event: part})
        except EXPECTED as error:
            yield sse.event(as_api_error(error).body())
        yield sse.DONE

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the parts of the reply in job order, while up to AT_ONCE jobs run."""
        jobs = self._plan.jobs
        upcoming = next(jobs, None)
        try:
            while upcoming is not None or self._running:
                while upcoming is not None and len(self._running) < AT_ONCE:
                    submission = await self._submit(upcoming)
                    if submission is None:
                        break
                    self._running.append(submission)
                    upcoming = next(jobs, None)
                computed = await gather(self._running[0])
                self._running.popleft()
                if (part := self._plan.part(computed)) is not None:
                    yield part
        finally:
            self.end()

    def end(self) -> None:
        """End the jobs that are still running, and release the reply's share of the budget."""
        for submission in self._running:
            submission.abort()
        self._running.clear()
        self._context.session.close()
        self._context.model.reply_budget.give_back(self._held)
        self._held = 0

    async def _submit(self, job: Any) -> Submission | None:
        """Submit a job. If the queue is full, returns None while another job of this series is
        running, and otherwise waits for room in the queue. Raises ApiError at the deadline."""
        session = self._context.session
        while True:
            try:
                return session.submit([job], more=True)
            except QueueFull:
                if self._running:
                    return None
                if session.expired:
                    raise timed_out("while it waited for room in the queue") from None
                await asyncio.sleep(FULL_SECONDS)
