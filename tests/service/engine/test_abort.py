"""AsyncEngine ends requests early: aborts, deadlines, and paused readers."""

import asyncio
from dataclasses import replace

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.events import FinishEvent, FinishReason, OutputsChunk, TokenEvent
from tests.service.engine.harness import (
    SPELLING,
    GatedEngine,
    all_rows,
    finishes,
    generation,
    rest,
    running,
    tiny,
    token_ids,
)
from tests.service.spelling import spelled


async def test_abort_ends_a_sequence_or_a_request() -> None:
    engine = tiny(slots=4)
    async with running(engine) as (owner, _):
        engine.gate.clear()
        submission = owner.submit([generation("a", 50, n=2), generation("b", 50)])
        owner._driver.abort("a", 1)
        engine.gate.set()
        events = await submission.take()
        while not any(isinstance(event, TokenEvent) for event in events):
            events += await submission.take()
        submission.stop("b", 0)
        events += await rest(submission)
        ends = {(e.request_id, e.index): e.reason for e in finishes(events)}
        assert ends == {
            ("a", 0): FinishReason.LENGTH,
            ("a", 1): FinishReason.ABORT,
            ("b", 0): FinishReason.STOP,  # as if its reader had found a stop string
        }
        submission.abort()  # no effect: they have ended
        assert owner.admission.sequences == 0


async def test_abort_of_a_waiting_request_ends_it_at_once() -> None:
    engine = GatedEngine(SPELLING, EngineConfig(slots=1))
    async with running(engine, drain_timeout=0) as (owner, _):
        first = owner.submit([generation("a", 8000)])
        second = owner.submit([generation("b", 8000)])
        await first.take()
        second.abort()
        (end,) = finishes(await rest(second))
        assert (end.reason, end.completion_tokens) == (FinishReason.ABORT, 0)
        assert end.times.admitted is None
        assert not first.finished
        first.abort()
        await rest(first)


async def test_deadline_ends_running_and_waiting_requests() -> None:
    engine = GatedEngine(SPELLING, EngineConfig(slots=1))
    async with running(engine) as (owner, _):
        soon = owner.now() + 0.05
        running_one = owner.submit([generation("a", 8000, deadline=soon)])
        waiting_one = owner.submit([generation("b", 8000, deadline=soon)])
        for submission in (running_one, waiting_one):
            (end,) = finishes(await rest(submission))
            assert end.reason is FinishReason.TIMEOUT
            assert end.times.finished >= soon


async def test_outputs_wait_for_their_reader_only() -> None:
    engine = GatedEngine(SPELLING, EngineConfig(slots=2, prefill_chunk=64))
    async with running(engine) as (owner, reports):
        rows = owner.submit([all_rows("rows", 640)])
        # Nobody reads the rows: the engine computes as many as its credit allows.
        events = await rest(owner.submit([generation("a", 50)]))
        assert token_ids(events, "a") == spelled("a", 50)
        handed = [e for r in reports for e in r.events if isinstance(e, OutputsChunk)]
        assert 1 <= len(handed) <= 2
        assert not rows.finished
        pieces = [e for e in await rest(rows) if isinstance(e, OutputsChunk)]
        assert [p for piece in pieces for p in piece.positions] == list(range(640))
        assert all(piece.rows.shape == (64, 257) for piece in pieces)


async def test_deadline_of_a_paused_request_passes_without_steps() -> None:
    engine = GatedEngine(SPELLING, EngineConfig(slots=1, prefill_chunk=64))
    async with running(engine) as (owner, reports):
        request = replace(all_rows("rows", 640), deadline=owner.now() + 0.2)
        submission = owner.submit([request])
        while not any(isinstance(e, FinishEvent) for r in reports for e in r.events):
            await asyncio.sleep(0.001)
        (end,) = finishes(await rest(submission))
        assert end.reason is FinishReason.TIMEOUT
