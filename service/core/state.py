"""ServiceState: what the routes of one application share.

Loading, ready, draining or failed; and, once ready, the checkpoint and its engine. Nothing is
global: an application has one of these, its routes get it by dependency.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fastapi import Depends, Request

from model.checkpoint.checkpoint import CheckpointInfo
from model.inference.engine.events import FinishEvent
from service.core.auth import NO_KEY, ApiKeys, KeyRing, read_api_keys
from service.core.callers import caller_of
from service.core.constraints import Constraints
from service.core.errors import ApiError, unavailable
from service.core.key_limits import KeyLimit
from service.core.metrics import Metrics
from service.core.reloader import Reloader
from service.core.reply_budget import ReplyBudget
from service.engine.admission import AdmissionController
from service.engine.async_engine import AsyncEngine
from service.engine.build import Computation
from service.engine.driver import StepReport
from service.engine.quantization import QuantizationCost
from service.engine.session import EngineSession
from service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")

USAGE = "usage"
"""Where the state of a request holds what it had the engine compute, for its line in the log."""

LATER_WEIGHTS = "these weights came while the server ran, and it measures when it starts"

Status = Literal["loading", "ok", "draining", "stalled", "failed"]


@dataclass(frozen=True)
class Served:
    """A checkpoint that answers, or several of the same shape, one after the other."""

    checkpoints: Mapping[int, CheckpointInfo]  # by the version of their weights in the engine
    computation: Computation
    engine: AsyncEngine
    session: EngineSession  # of a request of its own, while one is answered
    reloader: Reloader
    constraints: Constraints
    settings: ServeSettings
    reply_budget: ReplyBudget
    keys: KeyRing
    caller: str = ""  # to whom, while a request is answered

    @property
    def checkpoint(self) -> CheckpointInfo:
        """Whose weights answer; the newest before anything is submitted."""
        return self.checkpoints[self.session.version]

    @property
    def quantization(self) -> QuantizationCost | None:
        """What quantizing costs, which is measured for the weights that were there at the start."""
        cost = self.computation.quantization
        if cost is None or self.checkpoint.weights_sha256 == self.computation.weights_sha256:
            return cost
        return QuantizationCost(cost.kind, None, LATER_WEIGHTS, measurable=False)

    @property
    def context_length(self) -> int:
        return self.checkpoint.config.context_length

    @property
    def key_names(self) -> tuple[str, ...]:
        """Of the API keys that are accepted now; none: no request needs one."""
        return self.keys.names

    @property
    def admission(self) -> AdmissionController:
        """How much may wait for the engine."""
        return self.engine.admission

    @property
    def slots(self) -> int:
        return self.engine.slots

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model than the one served, unless any name is taken."""
        if name not in (None, self.checkpoint.name) and not self.settings.any_model_name:
            assert name is not None
            raise ApiError(
                404,
                "not_found_error",
                f"the model {name[:80]!r} is not served here, {self.checkpoint.name!r} is; "
                "--any-model-name answers whatever is asked for",
                "model",
                "model_not_found",
            )


class ServiceState:
    """The life of the service, and what it serves."""

    def __init__(self, settings: ServeSettings, keys: ApiKeys) -> None:
        self.settings = settings
        limit = KeyLimit(settings.key_per_minute, settings.key_at_once)
        self.keys = KeyRing(keys, limit)
        self.metrics = Metrics(callers=(*keys.names, NO_KEY) if keys.names else ())
        self.served: Served | None = None
        self.settled = asyncio.Event()  # loading has ended, well or badly
        self.long_texts = asyncio.Lock()  # held while one is encoded or decoded
        self._failure: str | None = None
        self._leaving = False  # not ready any more, and still answering
        self._draining = False

    def serve(self, served: Served) -> None:
        """Loading ended well."""
        self.served = served
        self.metrics.serving(
            served.checkpoint,
            served.slots,
            served.settings.max_queue,
            lambda: served.engine.open_elements,
        )
        self.settled.set()

    def fail(self, reason: str) -> None:
        """Loading ended badly."""
        self._failure = reason
        self.settled.set()

    def read_keys_again(self) -> tuple[str, ...]:
        """Accept the keys that the settings name now; their names. Raises ApiKeyError, and those
        from before are accepted still."""
        self.keys.replace(read_api_keys(self.settings.api_keys, self.settings.api_key_file))
        self.metrics.know_callers(self.keys.names)
        return self.keys.names

    def leave(self) -> None:
        """Say that there will soon be no answers, and give them until `drain`."""
        self._leaving = True

    async def drain(self) -> None:
        """Answer no new requests, let the running ones end, stop the engine."""
        self._draining = True
        if self.served is not None:
            await self.served.engine.stop(self.settings.drain_timeout)
            self.served.constraints.close()

    def on_step(self, report: StepReport) -> None:
        """Called after each step of the engine, on the event loop."""
        if self.served is not None:
            self.metrics.observe_step(report)
        for event in report.events:
            if isinstance(event, FinishEvent) and event.error is not None:
                _log(event)

    def status(self) -> tuple[Status, str | None]:
        """The state of the service and, when it is failed, why."""
        if self._failure is not None:
            return "failed", self._failure
        if self.served is None:
            return "loading", None
        if self.served.engine.failure is not None:
            return "failed", self.served.engine.failure
        if self.served.engine.restarting:
            return "loading", None
        if (seconds := self.served.engine.stalled()) is not None:
            return "stalled", f"a step of the engine has been running for {seconds:.0f} s"
        return ("draining" if self._leaving or self._draining else "ok"), None

    def ready(self) -> Served:
        """What is served; ApiError 503 unless requests are answered now."""
        status, reason = self.status()
        leaving = status == "draining" and not self._draining
        if (status == "ok" or leaving) and self.served is not None:
            return self.served
        raise unavailable(
            {
                "loading": "the checkpoint is being loaded; try again in a moment",
                "draining": "the server is shutting down",
            }.get(status, f"the service has failed: {reason}")
        )


def _log(event: FinishEvent) -> None:
    if event.param is None:
        logger.error("request %s: %s", event.request_id, event.error)
    else:  # the client is told; what its request says is not for the log
        logger.warning("request %s: its %s could not go on", event.request_id, event.param)


async def service_state(request: Request) -> ServiceState:
    state: ServiceState = request.app.state.service
    return state


async def served(
    request: Request, state: Annotated[ServiceState, Depends(service_state)]
) -> AsyncIterator[Served]:
    """What is served, with a session of the engine's that lasts as long as the request."""
    shared = state.ready()
    session = EngineSession(shared.engine)
    setattr(request.state, USAGE, session.usage)
    try:
        yield replace(shared, session=session, caller=caller_of(request))
    finally:
        session.close()


State = Annotated[ServiceState, Depends(service_state)]
Ready = Annotated[Served, Depends(served)]
