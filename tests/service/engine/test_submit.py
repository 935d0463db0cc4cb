"""AsyncEngine accepts or rejects requests: queue limits, reservations, impossible requests."""

import asyncio
import threading

import pytest

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.errors import InvalidRequest
from logitd.service.engine.admission import QueueFull
from logitd.service.engine.session import EngineSession
from logitd.service.engine.submission import EngineStopped
from tests.service.engine.harness import (
    TINY,
    GatedEngine,
    all_rows,
    finishes,
    generation,
    reserved,
    rest,
    running,
    tiny,
)
from tests.service.serving import TEST_TIMEOUT


async def test_impossible_request_is_refused_with_all_others() -> None:
    async with running(tiny()) as (owner, _):
        for request in (generation("x" * 100, 29), generation(""), all_rows("a", 129)):
            with pytest.raises(InvalidRequest):
                owner.submit([generation("good"), request])
            with pytest.raises(InvalidRequest):
                reserved(owner, [request])
        assert owner.admission.sequences == 0, "all or none"


async def test_queue_is_bounded_by_waiting_prompt_tokens() -> None:
    """Tokens of a running prompt do not count. An empty queue admits any prompt that fits the
    model; otherwise the prompt would never be computed."""
    permits = threading.Semaphore(1)
    engine = GatedEngine(TINY, EngineConfig(slots=1), permits=permits)
    async with running(engine, max_queue_tokens=98) as (owner, _):
        accepted = [owner.submit([generation("r" * 100)])]
        await accepted[0].take()
        accepted += [owner.submit([generation(name)]) for name in ("l" * 90, "one more")]
        with pytest.raises(QueueFull, match=r"98 prompt tokens waiting, limit 98$"):
            owner.submit([generation("a")])
        permits.release(1000)
        for submission in accepted:
            await rest(submission)


async def test_drain_waits_for_a_reservation() -> None:
    async with running(tiny()) as (owner, _):
        reservation = reserved(owner, [all_rows("a", 9), all_rows("b", 9)])
        await rest(reservation.submit_next())
        stopping = asyncio.ensure_future(owner.stop(TEST_TIMEOUT))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            owner.submit([generation("late")])
        assert len(await rest(reservation.submit_next())) == 2
        assert not stopping.done()
        reservation.close()
        await stopping


async def test_drain_waits_for_what_a_session_still_submits() -> None:
    """A sweep, or a request that is computed in two parts, has nothing in the queue at times."""
    async with running(tiny()) as (owner, _):
        session = EngineSession(owner)
        await rest(session.submit([generation("a")], more=True))
        stopping = asyncio.ensure_future(owner.stop(TEST_TIMEOUT))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            EngineSession(owner).submit([generation("late")])
        assert len(finishes(await rest(session.submit([generation("b")])))) == 1
        await stopping


async def test_stopped_engine_refuses_reserved_requests() -> None:
    async with running(tiny()) as (owner, _):
        reservation = reserved(owner, [all_rows("a", 9), all_rows("b", 9)])
        await owner.stop(0)
        with pytest.raises(EngineStopped, match="shutting down"):
            reservation.submit_next()
        reservation.close()
