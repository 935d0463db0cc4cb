"""RequestContext: one request on its way: the model that answers, the caller, the deadline.

Submits engine requests in the caller's name, all of them to one version of the weights, and ends
work whose client has gone. Not here: which model answers (`models.py`).
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.engine import requests as engine
from logitd.model.inference.engine.events import FinishEvent
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Subject
from logitd.service.engine.async_engine import Reservation
from logitd.service.engine.session import EngineSession
from logitd.service.engine.submission import Submission
from logitd.service.errors import client_gone, raise_failure
from logitd.service.models.served import ServedModel

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request.

    session   its submissions; closed when the request is answered
    caller    the name by which callers share the engine
    deadline  on the engine's clock; None: none
    """

    model: ServedModel
    session: EngineSession
    request: Request
    caller: str
    deadline: float | None = None

    @property
    def checkpoint(self) -> CheckpointInfo:
        """The weights that answer: the newest until something is submitted."""
        return self.model.checkpoints[self.session.version]

    @property
    def subject(self) -> Subject:
        """The model as operations see it."""
        settings = self.model.settings
        return Subject(self.checkpoint, settings.max_reply_elements, settings.max_body_bytes)

    def submit(self, requests: Sequence[engine.Request], *, more: bool = False) -> Submission:
        """Queue requests, all or none. `more`: others will follow."""
        return self.session.submit([self._signed(request) for request in requests], more=more)

    def reserve(self, requests: Sequence[engine.Request]) -> Reservation:
        """Room for requests that run one after another; nothing else follows."""
        return self.session.reserve([self._signed(request) for request in requests])

    async def compute(self, requests: Sequence[engine.Request], *, more: bool = False) -> Computed:
        """Everything that requests compute, unless the client leaves."""
        return await self.unless_gone(gather(self.submit(requests, more=more)))

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, but cancel it when the client leaves: a plain handler would not notice."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(_gone(self.request))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise client_gone()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    def _signed(self, request: engine.Request) -> engine.Request:
        """A request with its caller and deadline."""
        return replace(request, caller=self.caller, deadline=self.deadline)


async def gather(submission: Submission) -> Computed:
    """Wait for all of a submission. Raises ApiError when a sequence ended early, EngineStopped when
    the engine failed; whatever ends this call ends the submission."""
    computed = Computed()
    try:
        while not submission.finished:
            for event in await submission.take():
                if isinstance(event, FinishEvent):
                    raise_failure(event)
                computed.add(event)
    finally:
        submission.abort()
    return computed


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
