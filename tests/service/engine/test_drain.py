"""AsyncEngine stops: running requests finish or are aborted, and nothing is left over."""

import asyncio
import random

import pytest

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.events import FinishReason
from logitd.service.engine.admission import Load
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.submission import EngineStopped
from tests.service.engine.harness import (
    SPELLING,
    GatedEngine,
    all_rows,
    finishes,
    generation,
    rest,
    running,
    tiny,
)
from tests.service.serving import TEST_TIMEOUT


async def test_drain_lets_requests_finish() -> None:
    async with running(tiny(slots=1)) as (owner, _):
        submissions = [owner.submit([generation(name, 30)]) for name in "abc"]
        stopping = asyncio.ensure_future(owner.stop(TEST_TIMEOUT))
        for submission in submissions:
            (end,) = finishes(await rest(submission))
            assert end.reason is FinishReason.LENGTH
        await stopping
        with pytest.raises(EngineStopped, match="shutting down"):
            owner.submit([generation("late")])


async def test_short_drain_aborts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    engine = GatedEngine(SPELLING, EngineConfig(slots=1))
    async with running(engine) as (owner, _):
        submissions = [owner.submit([generation(name, 8000)]) for name in "ab"]
        await submissions[0].take()
        await owner.stop(0.01)
        for submission in submissions:
            (end,) = finishes(await rest(submission))
            assert end.reason is FinishReason.ABORT
        assert owner.admission.sequences == 0
    assert caplog.messages == ["aborting 2 sequences at shutdown"]


async def test_idle_engine_stops_without_a_log_line_and_may_stop_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(tiny()) as (owner, _):
        await owner.stop(0)
        await owner.stop(0)
    assert caplog.messages == []


@pytest.mark.slow
async def test_hundreds_of_requests_leave_no_task_and_no_record() -> None:
    """Requests of every kind, some of them aborted."""

    async def one(owner: AsyncEngine, number: int) -> None:
        rng = random.Random(number)
        name = f"{number:05}" + "x" * rng.randrange(60)
        if number % 5 == 0:
            submission, sequences = owner.submit([all_rows(name, rng.randint(1, 40))]), 1
        else:
            sequences = rng.randint(1, 3)
            submission = owner.submit([generation(name, rng.randint(1, 6), n=sequences)])
        if number % 7 == 0:
            submission.abort()
        assert len(finishes(await rest(submission))) == sequences
        assert submission.finished

    async with running(tiny(slots=16), max_queue=1000, max_queue_tokens=10**6) as (owner, _):
        tasks = len(asyncio.all_tasks())
        for first in range(0, 500, 100):
            await asyncio.gather(*(one(owner, first + i) for i in range(100)))
        assert len(asyncio.all_tasks()) == tasks
        assert owner.admission.sequences == 0
        assert not owner._open
        assert owner.admission._open.total == Load()
