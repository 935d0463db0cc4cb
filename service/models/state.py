"""ServiceState: what the routes of one application share.

Loading, ready, draining or failed; and, once ready, the models that are served (`models.py`).
Nothing is global: an application has one of these, its routes get it by dependency.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal

from fastapi import Depends, Query, Request

from logitd.model.inference.engine.events import FinishEvent
from logitd.service.access.auth import NO_KEY, ApiKeys, KeyRing, read_api_keys
from logitd.service.access.key_limits import KeyLimit
from logitd.service.engine.driver import StepReport, StepThread
from logitd.service.errors import unavailable
from logitd.service.metrics.metrics import Metrics
from logitd.service.metrics.model_metrics import ModelMetrics
from logitd.service.models.choice import ModelChoice
from logitd.service.models.context import RequestContext
from logitd.service.models.reply_budget import ReplyBudget
from logitd.service.models.served import Models, NotLoaded, ServedModel
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")

Status = Literal["loading", "ok", "draining", "stalled", "failed"]


class ServiceState:
    """The life of the service, and what it serves."""

    def __init__(self, settings: ServeSettings, keys: ApiKeys) -> None:
        self.settings = settings
        limit = KeyLimit(settings.key_per_minute, settings.key_at_once)
        self.keys = KeyRing(keys, limit)
        self.metrics = Metrics(callers=(*keys.names, NO_KEY) if keys.names else ())
        for source in settings.models:
            self.metrics_of(source)  # there from the start
        self.models = Models()
        self.reply_budget = ReplyBudget(settings.max_reply_elements)
        self.reload_lock = asyncio.Lock()  # held while a second set of weights is in memory
        self.settled = asyncio.Event()  # loading has ended, well or badly
        self.long_texts = asyncio.Lock()  # held while one is encoded or decoded
        self.waits_for: str | None = None  # a checkpoint that a training has yet to save
        self._steps: StepThread | None = None
        self._failure: str | None = None
        self._leaving = False  # not ready any more, and still answering
        self._draining = False

    def metrics_of(self, source: ModelSource) -> ModelMetrics:
        """The series of a model, under the name that it has at the start."""
        return self.metrics.of(source.served_name)

    def serve(
        self, models: Sequence[ServedModel | NotLoaded], steps: StepThread | None = None
    ) -> None:
        """Loading ended, well for one of them at least; `steps` is where they compute in turn."""
        self.models = Models(models, any_name=self.settings.any_model_name)
        self._steps = steps
        for source, model in zip(self.settings.models, models, strict=True):
            if isinstance(model, ServedModel):
                self._observe(source, model)
        self.metrics.ready.set(1)
        self.settled.set()

    def _observe(self, source: ModelSource, served: ServedModel) -> None:
        self.metrics_of(source).serving(
            served.checkpoint,
            served.slots,
            served.settings.max_queue,
            lambda: served.engine.open_elements,
        )

    def fail(self, reason: str) -> None:
        """Loading ended badly: there will never be anything to serve."""
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
        served = self.models.served
        timeout = self.settings.drain_timeout
        await asyncio.gather(*(model.engine.stop(timeout) for model in served))
        for model in served:
            model.constraints.close()
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def on_step(self, metrics: ModelMetrics, report: StepReport) -> None:
        """Called after each step of a model's engine, on the event loop."""
        metrics.observe_step(report)
        for event in report.events:
            if isinstance(event, FinishEvent) and event.error is not None:
                _log(event)

    def status(self) -> tuple[Status, str | None]:
        """The state of the service and, if it failed or waits, why. One model that could not be
        loaded does not count against the others (`Models`); one whose engine fails or hangs does,
        since that is mended by a new process."""
        if self._failure is not None:
            return "failed", self._failure
        if not self.settled.is_set():
            return "loading", self.waits_for and f"waiting for {self.waits_for}"
        said = [(model.name, *model.status()) for model in self.models.served]
        for bad in ("failed", "stalled"):
            for name, status, reason in said:
                if status == bad:
                    return status, f"{name}: {reason}" if self.models.several else reason
        return ("draining" if self._leaving or self._draining else "ok"), None

    def ready(self) -> Models:
        """What is served; ApiError 503 unless requests are answered now."""
        status, reason = self.status()
        leaving = status == "draining" and not self._draining
        if status == "ok" or leaving:
            return self.models
        raise unavailable(
            {
                "loading": f"{reason or 'the checkpoint is being loaded'}; try again in a moment",
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


async def model_choice(
    request: Request, state: Annotated[ServiceState, Depends(service_state)]
) -> AsyncIterator[ModelChoice]:
    """What is served, for a request that has yet to say which of it is to answer."""
    choice = ModelChoice(state.ready(), request)
    try:
        yield choice
    finally:
        choice.close()


State = Annotated[ServiceState, Depends(service_state)]
Ready = Annotated[ModelChoice, Depends(model_choice)]
AskedModel = Annotated[
    str | None, Query(description="If given, a name that is served here; else the first.")
]


async def chosen(models: Ready, model: AskedModel = None) -> RequestContext:
    """The model that the address of a GET names, the first if it names none."""
    return models.of(model)


Chosen = Annotated[RequestContext, Depends(chosen)]
