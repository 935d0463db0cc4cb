"""AsyncEngine delivers events to the right mailbox, once per step."""

import asyncio
import threading

import pytest

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.events import Event, FinishEvent, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest, Request
from logitd.model.inference.reference import generate
from tests.service.engine.harness import (
    TINY,
    GatedEngine,
    finishes,
    generation,
    rest,
    running,
    tiny,
    token_ids,
)
from tests.service.serving import TEST_TIMEOUT


async def test_submission_gets_its_events_and_one_end_per_sequence() -> None:
    async with running(tiny(slots=2)) as (owner, _):
        requests: list[Request] = [
            generation(f"request {i}", tokens=i + 1, n=1 + i % 2, seed=i) for i in range(8)
        ]
        submissions = [owner.submit([request]) for request in requests]
        assert owner.admission.sequences == 12
        for request, submission in zip(requests, submissions, strict=True):
            assert isinstance(request, GenerationRequest)
            events = await rest(submission)
            assert {event.request_id for event in events} == {request.request_id}
            assert len(finishes(events)) == request.n
            assert isinstance(events[-1], FinishEvent)
            for index in range(request.n):
                assert token_ids(events, request.request_id, index) == generate(
                    TINY, request.token_ids, request.params, index
                )
        assert owner.admission.sequences == 0


async def test_step_delivers_the_tokens_of_all_sequences_together() -> None:
    engine = tiny(slots=4)
    async with running(engine) as (owner, reports):
        engine.gate.clear()
        submission = owner.submit([generation("a", 10, n=4)])
        engine.gate.set()
        await rest(submission)
    assert len(reports) == engine.steps
    tokens = [sum(isinstance(e, TokenEvent) for e in report.events) for report in reports]
    assert sum(tokens) == 40
    assert max(tokens) == 4, "tokens of one step come together"
    assert engine.steps < 20


async def test_tokens_wait_while_the_loop_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of first tokens and of the last step are woken immediately."""
    monkeypatch.setattr("logitd.service.engine.wakeup.PAUSE_FACTOR", 1e9)
    monkeypatch.setattr("logitd.service.engine.wakeup.MAX_PAUSE", TEST_TIMEOUT)
    permits = threading.Semaphore(0)
    engine = GatedEngine(TINY, EngineConfig(slots=4), permits=permits)
    async with running(engine) as (owner, reports):
        first = owner.submit([generation("a", 10)])
        permits.release()
        assert len(token_ids(await first.take(), "a")) == 1
        permits.release(3)
        assert await first.take(timeout=0.1) == []
        second = owner.submit([generation("b", 10)])
        permits.release(2)  # a step may have begun without it
        assert len(token_ids(await second.take(), "b")) == 1
        before = token_ids(await first.take(), "a")
        assert len(before) >= 4
        permits.release(20)
        assert len(token_ids(await rest(first), "a")) == 9 - len(before)
        assert len(token_ids(await rest(second), "b")) == 9
        assert len(reports) >= 11, "each step is still reported"


async def test_waiting_tokens_come_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are delivered even if the thread is in a step that does not end."""
    monkeypatch.setattr("logitd.service.engine.wakeup.PAUSE_FACTOR", 1e9)
    permits = threading.Semaphore(0)
    engine = GatedEngine(TINY, EngineConfig(slots=4), permits=permits)
    async with running(engine) as (owner, _):
        submission = owner.submit([generation("a", 8)])
        permits.release()
        assert len(token_ids(await submission.take(), "a")) == 1
        for _ in range(3):
            permits.release(2)
            events: list[Event] = []
            while len(events) < 2:
                events += await submission.take()
            assert len(token_ids(events, "a")) == 2
        permits.release(20)
        await rest(submission)


async def test_take_returns_nothing_after_its_timeout() -> None:
    engine = tiny()
    async with running(engine) as (owner, _):
        engine.gate.clear()
        submission = owner.submit([generation("a", 2)])
        assert await submission.take(timeout=0.01) == []
        assert not submission.finished
        engine.gate.set()
        assert len(token_ids(await rest(submission), "a")) == 2


async def test_take_can_be_cancelled() -> None:
    """The cancellation wins even if an event arrives at the same moment. Otherwise the request of a
    disconnected client would continue."""
    engine = tiny()
    async with running(engine) as (owner, reports):
        engine.gate.clear()
        submission = owner.submit([generation("a", 100)])
        taking = asyncio.ensure_future(submission.take(timeout=TEST_TIMEOUT))
        await asyncio.sleep(0)
        engine.gate.set()
        while not reports:  # delivery and cancellation happen in the same iteration of the loop
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait({taking})
        assert taking.cancelled()
        await rest(submission)
