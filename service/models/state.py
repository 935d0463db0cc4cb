"""ServiceState: the state that all routes of an application share: its status (loading, ready,
draining or failed) and its models (`served.py`). Routes get it as a FastAPI dependency."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from fastapi import Depends, Query, Request

from logitd.model.inference.engine.events import FinishEvent
from logitd.service.access.auth import NO_KEY, ApiKeys, KeyRing, read_api_keys
from logitd.service.access.held import held
from logitd.service.access.key_limits import KeyLimit
from logitd.service.engine.driver import StepReport, StepThread
from logitd.service.errors import unavailable
from logitd.service.metrics.metrics import Metrics
from logitd.service.models.context import ModelChoice, RequestContext
from logitd.service.models.served import Models, NotLoaded, ReplyBudget, ServedModel
from logitd.service.models.turns import CallerTurns
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")

PLAN_THREADS = 4
"""Maximum number of threads that make plans at a time. They are fewer than the threads of the event
loop, of which there are at least five, so plans wait here, where callers take turns."""

Status = Literal["loading", "ok", "draining", "stalled", "failed"]


class ServiceState:
    """The status of a service, and its models."""

    def __init__(self, settings: ServeSettings, keys: ApiKeys) -> None:
        self.settings = settings
        limit = KeyLimit(settings.key_per_minute, settings.key_at_once)
        self.keys = KeyRing(keys, limit)
        self.metrics = Metrics(callers=(*keys.names, NO_KEY) if keys.names else ())
        for source in settings.models:
            self.metrics.of(source.served_name)  # create its series at the start
        self.models = Models()
        self.reply_budget = ReplyBudget(settings.max_reply_elements)
        self.reload_lock = asyncio.Lock()  # held while a second set of weights is in memory
        self.settled = asyncio.Event()  # loading has ended, successfully or not
        self.long_texts = CallerTurns()  # held while a long text is encoded or decoded
        self.short_texts = CallerTurns()  # held while a short one is
        self.feature_lists = CallerTurns()  # held while a list of features is written
        self.log_reads = CallerTurns()  # held while the log of a training run is parsed
        self.weight_reads = CallerTurns()  # held while weights are read from a file
        self.plans = CallerTurns(PLAN_THREADS)  # a place is held while a plan is made in a thread
        self.waits_for: str | None = None  # a checkpoint that a training run has not saved yet
        self._steps: StepThread | None = None
        self._failure: str | None = None
        self._leaving = False  # no longer ready, but requests are still answered
        self._draining = False
        self.metrics.ready.set_function(lambda: float(self._answers(self.status()[0])))

    def serve(
        self, models: Sequence[ServedModel | NotLoaded], steps: StepThread | None = None
    ) -> None:
        """Serve these models, at least one of which is loaded. `steps` is the thread that runs the
        steps of all engines, if they share one."""
        self.models = Models(models, any_name=self.settings.any_model_name)
        self._steps = steps
        for source, model in zip(self.settings.models, models, strict=True):
            if isinstance(model, ServedModel):
                metrics = self.metrics.of(source.served_name)
                metrics.serving(model.checkpoint, model.engine.admission, model.engine.step_seconds)
        self.settled.set()

    def fail(self, reason: str) -> None:
        self._failure = reason
        self.settled.set()

    def read_keys_again(self) -> tuple[str, ...]:
        """Read the API keys again from the settings' sources. Returns their names. Raises
        ApiKeyError, in which case the old keys remain valid."""
        self.keys.replace(read_api_keys(self.settings.api_keys, self.settings.api_key_file))
        self.metrics.know_callers(self.keys.names)
        return self.keys.names

    def leave(self) -> None:
        """Report that the server is draining, although it still answers requests until `drain` is
        called."""
        self._leaving = True

    async def drain(self) -> None:
        """Reject new requests, let running ones finish, and stop the engines."""
        self._draining = True
        served = self.models.served
        timeout = self.settings.drain_timeout
        histories = [model.history for model in served if model.history is not None]
        await asyncio.gather(
            *(model.engine.stop(timeout) for model in served),
            *(history.stop(timeout) for history in histories),
        )
        for model in served:
            model.constraints.close()
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def status(self) -> tuple[Status, str | None]:
        """The status of the service, and the reason if it has failed or hangs, or if it is waiting
        for the first checkpoint of a training run.

        Models that could not be loaded do not affect the status if at least one is loaded. An
        engine that fails or hangs does, because restarting the process helps.
        """
        if self._failure is not None:
            return "failed", self._failure
        if not self.settled.is_set():
            return "loading", self.waits_for and f"waiting for {self.waits_for}"
        statuses = [(model.name, *model.status()) for model in self.models.served]
        for bad in ("failed", "stalled"):
            for name, status, reason in statuses:
                if status == bad:
                    return status, f"{name}: {reason}" if self.models.several else reason
        return ("draining" if self._leaving or self._draining else "ok"), None

    def ready(self) -> Models:
        """The models. Raises ApiError (503) unless requests are being answered."""
        status, reason = self.status()
        if self._answers(status):
            return self.models
        raise unavailable(
            {
                "loading": f"{reason or 'the checkpoint is being loaded'}; try again in a moment",
                "draining": "the server is shutting down",
            }.get(status, f"the service has failed: {reason}")
        )

    def _answers(self, status: Status) -> bool:
        """True if requests are answered in this status. After `leave`, they are until `drain`."""
        return status == "ok" or (status == "draining" and not self._draining)


def observe_step(observe: Callable[[StepReport], None], report: StepReport) -> None:
    """Count a step of a model's engine with `observe`; log sequences that ended with an error."""
    observe(report)
    for event in report.events:
        if isinstance(event, FinishEvent) and event.error is not None:
            if event.param is None:
                logger.error("engine request %s: %s", event.request_id, event.error)
            else:  # only the client gets details: the log must not contain content of requests
                logger.warning("engine request %s: its %s failed", event.request_id, event.param)


async def service_state(request: Request) -> ServiceState:
    state: ServiceState = request.app.state.service
    return state


State = Annotated[ServiceState, Depends(service_state)]


async def model_choice(request: Request, state: State) -> ModelChoice:
    """The models that a request can choose from."""
    choice = ModelChoice(state.ready(), request)
    held(request.scope).callback(choice.close)
    return choice


Ready = Annotated[ModelChoice, Depends(model_choice)]
AskedModel = Annotated[
    str | None, Query(description="Name of a served model. Absent: the first one.")
]


async def chosen(models: Ready, model: AskedModel = None) -> RequestContext:
    return models.of(model)


Chosen = Annotated[RequestContext, Depends(chosen)]
