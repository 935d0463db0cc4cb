"""AsyncEngine stops: running requests finish or are aborted, and nothing is left over."""

import asyncio
import random

import pytest

from logitd.service.engine.admission import Load
from logitd.service.engine.async_engine import AsyncEngine
from tests.service.engine.harness import (
    all_rows,
    finishes,
    generation,
    rest,
    running,
    tiny,
)


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
