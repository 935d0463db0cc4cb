"""AsyncEngine accepts or rejects requests: queue limits, reservations, impossible requests."""

import asyncio

import pytest

from logitd.model.inference.engine.events import OutputsChunk
from logitd.model.inference.errors import InvalidRequest
from logitd.service.engine.admission import QueueFull
from logitd.service.engine.submission import EngineStopped
from tests.service.engine.harness import (
    all_rows,
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


async def test_queue_is_bounded_by_prompt_tokens() -> None:
    """An empty queue admits any prompt that fits the model; otherwise it would never be
    computed."""
    engine = tiny(slots=1)
    async with running(engine, max_queue=50, max_queue_tokens=60) as (owner, _):
        engine.gate.clear()
        accepted = [owner.submit([generation("r" * 100)])]
        accepted.append(owner.submit([generation("l" * 90)]))
        with pytest.raises(QueueFull, match=r"prompt tokens waiting, limit 60$"):
            owner.submit([generation("one more")])
        engine.gate.set()
        for submission in accepted:
            await rest(submission)
        await rest(owner.submit([generation("one more")]))


async def test_reservation_covers_all_its_requests() -> None:
    async with running(tiny(slots=2), max_queue=1) as (owner, _):
        reservation = reserved(owner, [all_rows(name, 9) for name in "abc"])
        assert (owner.admission.sequences, owner.admission.elements) == (3, 3 * 9 * 257)
        with pytest.raises(QueueFull):
            owner.submit([generation("late")])
        for name in "abc":
            submission = reservation.submit_next()
            assert submission.request_ids == (name,)
            rows = [e for e in await rest(submission) if isinstance(e, OutputsChunk)]
            assert len(rows) == 1
        assert owner.admission.elements == 0
        reservation.close()
        assert owner.admission.sequences == 0


async def test_closed_reservation_frees_its_room() -> None:
    async with running(tiny(slots=1), max_queue=2) as (owner, _):
        reservation = reserved(owner, [all_rows(name, 9) for name in "abc"])
        await rest(reservation.submit_next())
        assert owner.admission.elements == 2 * 9 * 257
        reservation.close()
        reservation.close()
        assert (owner.admission.sequences, owner.admission.elements) == (0, 0)
        await rest(owner.submit([generation("a", n=3)]))


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


async def test_stopped_engine_refuses_reserved_requests() -> None:
    async with running(tiny()) as (owner, _):
        reservation = reserved(owner, [all_rows("a", 9), all_rows("b", 9)])
        await owner.stop(0)
        with pytest.raises(EngineStopped, match="shutting down"):
            reservation.submit_next()
        reservation.close()
