"""RequestContext: one request to a model, with its submissions and its caller.

`ModelChoice` chooses the model and creates the context. The context ends the work of a request when
its client leaves.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.engine import requests as engine
from logitd.model.inference.engine.events import Event, FinishEvent
from logitd.model.operations.body import ModelBody
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Subject
from logitd.model.operations.prompts import clip
from logitd.service.access.callers import caller_of
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.session import EngineSession
from logitd.service.engine.submission import Submission
from logitd.service.errors import bad_request, client_gone, raise_failure, timed_out
from logitd.service.models.served import Models, ServedModel
from logitd.service.models.turns import CallerTurns
from logitd.service.threads import to_thread_until_done

Result = TypeVar("Result")

CONTEXT = "context"
"""`request.state` key of the request's context; read by the log and by tracing."""
MODEL = "model"
"""`request.state` key of the name of the model that answers, set if the server has several models;
read by the log."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request to a model, and what its handler needs.

    session   its submissions, with caller and deadline; closed after the reply
    caller    name of the caller; the engine is shared fairly among callers
    deadline  on the engine's clock; None without a timeout
    """

    model: ServedModel
    session: EngineSession
    request: Request
    caller: str
    deadline: float | None

    @property
    def checkpoint(self) -> CheckpointInfo:
        """The checkpoint that answers the request. Before the first submission, this is the newest
        checkpoint."""
        return self.model.checkpoints[self.session.version]

    @property
    def subject(self) -> Subject:
        """The model in the form that operations accept."""
        settings = self.model.settings
        return Subject(self.checkpoint, settings.max_reply_elements, settings.max_body_bytes)

    async def compute(self, requests: Sequence[engine.Request], *, more: bool = False) -> Computed:
        """Compute the results of requests. Raises ApiError if the client leaves."""
        return await self.unless_gone(gather(self.session.submit(requests, more=more)))

    async def in_time(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work` that the engine does not end at the deadline, as `unless_gone` does. Raises
        ApiError at the deadline."""
        async with _until(self.deadline, self.model.engine):
            return await self.unless_gone(work)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Do a part of planning in a thread. Callers take turns for the threads."""
        plans: CallerTurns = self.request.app.state.service.plans
        async with plans.turn(self.caller):
            return await to_thread_until_done(work)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`. If the client leaves, cancel the work and raise ApiError."""
        return await _unless_gone(self.request, work)


class ModelChoice:
    """The models that a request can choose from."""

    def __init__(self, models: Models, request: Request) -> None:
        self.all = models
        self._request = request
        self._sessions: list[EngineSession] = []
        self._ends: list[Callable[[], None]] = []

    def of(self, name: str | None, timeout: float | None = None) -> RequestContext:
        """The context of a request to the model with this name (None: the first one), with a
        deadline in `timeout` seconds. Raises the same errors as `Models.find`."""
        model = self.all.find(name)
        return self._context(model, _deadline(model, timeout))

    async def answering(self, body: ModelBody) -> RequestContext:
        """The context of the request with this body, whose fields specify the model, the step and
        the timeout. Raises the same errors as `at`."""
        return await self.at(body.model, body.step, getattr(body, "timeout", None))

    async def at(
        self, name: str | None, step: int | None, timeout: float | None = None
    ) -> RequestContext:
        """The context of a request to a model at a step of its run (None: as served). Raises the
        same errors as `Models.find` and `History.open`, and ApiError for a step if the model has no
        history."""
        if step is None:
            return self.of(name, timeout)
        model = self.all.find(name)
        if model.history is None:
            raise bad_request(
                f"step is {step}, but only one step of the model {clip(model.name)!r} is "
                "served: leave step out, or start the server with --history",
                "step",
            )
        deadline = _deadline(model, timeout)
        caller = caller_of(self._request)
        async with _until(deadline, model.engine):
            at_step = await _unless_gone(self._request, model.history.open(step, caller))
        self._ends.append(partial(model.history.close, step, caller))
        return self._context(at_step, deadline)

    def _context(self, model: ServedModel, deadline: float | None) -> RequestContext:
        caller = caller_of(self._request)
        session = EngineSession(model.engine, caller, deadline)
        self._sessions.append(session)
        context = RequestContext(model, session, self._request, caller, deadline)
        setattr(self._request.state, CONTEXT, context)
        if self.all.several:
            setattr(self._request.state, MODEL, model.name)
        return context

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        for end in self._ends:
            end()


def _deadline(model: ServedModel, timeout: float | None) -> float | None:
    """The end of a timeout that begins now, on the clock that all engines share."""
    return None if timeout is None else model.engine.now() + timeout


@asynccontextmanager
async def _until(deadline: float | None, engine: AsyncEngine) -> AsyncIterator[None]:
    """Cancel the work in this context at a deadline on the engine's clock, and raise ApiError."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - engine.now()):
            yield
    except TimeoutError as error:
        raise timed_out("before the request was computed") from error


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`. If the client leaves, which a plain handler would not notice, cancel the work
    and raise ApiError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise client_gone()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def events_of(submission: Submission) -> AsyncIterator[Event]:
    """Yield the events of a submission. Raises ApiError if a sequence fails, and EngineStopped if
    the engine does."""
    while not submission.finished:
        for event in await submission.take():
            if isinstance(event, FinishEvent):
                raise_failure(event)
            yield event


async def gather(submission: Submission) -> Computed:
    """Wait for all events of a submission. Raises the same errors as `events_of`. Cancelling this
    call aborts the submission."""
    computed = Computed()
    try:
        async for event in events_of(submission):
            computed.add(event)
    finally:
        submission.abort()
    return computed


async def disconnected(receive: Receive) -> None:
    """Return when the client has left. The body must have been read already."""
    while (await receive())["type"] != "http.disconnect":
        pass
