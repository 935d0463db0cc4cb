"""A running AsyncEngine and requests for it. Real engines, small models."""

import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import Event, FinishEvent, StepResult, TokenEvent
from logitd.model.inference.engine.requests import (
    GenerationRequest,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT
from logitd.service.engine.admission import AdmissionController, QueueLimits
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.driver import EngineDriver, OnCompute, StepReport, WeightsLoader
from logitd.service.engine.session import EngineSession
from logitd.service.engine.submission import Submission
from tests.model.factories import tiny_gpt
from tests.model.inference.engine.harness import check_integrity
from tests.service.serving import TEST_TIMEOUT
from tests.service.spelling import long_prompt, spelling_gpt

TINY = tiny_gpt()


SPELLING = spelling_gpt()


LIMITS = QueueLimits(sequences=10, tokens=1000, elements=10**6, per_request=64, most_tokens=10**6)


class GatedEngine(Engine):
    """Runs a step only while its gate is open. If `permits` is given, each step also takes a
    permit."""

    def __init__(
        self, *args: Any, permits: threading.Semaphore | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.gate.set()
        self.steps = 0
        self._permits = permits

    def step(self, on_compute: OnCompute | None = None) -> StepResult:
        if on_compute is not None:
            on_compute()
        assert self.gate.wait(TEST_TIMEOUT)
        assert self._permits is None or self._permits.acquire(timeout=TEST_TIMEOUT)
        self.steps += 1
        return super().step()


def no_weights(path: Path, weights_sha256: str) -> GPT:
    raise LookupError(f"this test has no reload, but {path} was requested")


@asynccontextmanager
async def running(
    engine: Engine,
    max_queue: int = 100,
    max_queue_tokens: int = 10_000,
    max_queue_elements: int = 10**7,
    stall_timeout: float = TEST_TIMEOUT,
    drain_timeout: float = TEST_TIMEOUT,
    load: WeightsLoader = no_weights,
) -> AsyncIterator[tuple[AsyncEngine, list[StepReport]]]:
    reports: list[StepReport] = []
    limits = QueueLimits(
        sequences=max_queue,
        tokens=max_queue_tokens,
        elements=max_queue_elements,
        per_request=64,
        most_tokens=10**6,
    )
    owner = AsyncEngine(
        EngineDriver(engine, load),
        AdmissionController(engine.model_config, engine.slots, limits),
        stall_timeout=stall_timeout,
        on_step=reports.append,
    )
    try:
        yield owner, reports
    finally:
        await owner.stop(drain_timeout)
        check_integrity(engine)


def tiny(slots: int = 4) -> GatedEngine:
    return GatedEngine(TINY, EngineConfig(slots=slots))


def generation(
    name: str, tokens: int = 5, *, n: int = 1, seed: int = 0, deadline: float | None = None
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        token_ids=tuple(name.encode()),
        params=SamplingParams(max_tokens=tokens, seed=seed),
        n=n,
        deadline=deadline,
    )


def all_rows(name: str, length: int) -> OutputsRequest:
    return OutputsRequest(
        request_id=name, token_ids=tuple(long_prompt(length)), positions=tuple(range(length))
    )


def scores(name: str, *lengths: int) -> ScoreRequest:
    """A request for continuations of these lengths after a prompt of ten tokens."""
    return ScoreRequest(
        request_id=name,
        token_ids=tuple(long_prompt(10)),
        continuations=tuple(tuple(long_prompt(length)) for length in lengths),
    )


def prompt_logprobs(name: str, length: int, n: int = 1) -> GenerationRequest:
    prompt = tuple(long_prompt(length))
    return replace(generation(name, 2, n=n), token_ids=prompt, prompt_logprobs=0)


def reserved(owner: AsyncEngine, requests: list[Request]) -> EngineSession:
    session = EngineSession(owner)
    with ExitStack() as unless_reserved:
        unless_reserved.callback(session.close)
        session.reserve(requests)
        unless_reserved.pop_all()
    return session


async def rest(submission: Submission) -> list[Event]:
    events: list[Event] = []
    while not submission.finished:
        events += await submission.take()
    return events


def token_ids(events: list[Event], name: str, index: int = 0) -> list[int]:
    return [
        event.token_id
        for event in events
        if isinstance(event, TokenEvent) and (event.request_id, event.index) == (name, index)
    ]


def finishes(events: list[Event]) -> list[FinishEvent]:
    return [event for event in events if isinstance(event, FinishEvent)]
