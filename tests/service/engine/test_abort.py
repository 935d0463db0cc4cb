"""AsyncEngine ends requests early: after an abort, or at a deadline, even while the reader is
paused."""

import asyncio
from dataclasses import replace

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.events import FinishEvent, FinishReason, TokenEvent
from logitd.service.engine.usage import Usage
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


async def test_abort_ends_a_sequence_or_a_request() -> None:
    engine = tiny(slots=4)
    async with running(engine) as (owner, _):
        engine.gate.clear()
        usage = Usage()
        requests = [generation("a", 50, n=2), generation("b", 50)]
        submission = owner.submit(requests, usage=usage)
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
        submission.stop("a", 0)  # its reader finds a stop string in the last tokens
        assert usage.reasons == {**ends, ("a", 0): FinishReason.STOP}
        assert owner.admission.sequences == 0


async def test_deadline_of_a_paused_request_passes_without_steps() -> None:
    engine = GatedEngine(SPELLING, EngineConfig(slots=1, prefill_chunk=64))
    async with running(engine) as (owner, reports):
        request = replace(all_rows("rows", 640), deadline=owner.now() + 0.2)
        submission = owner.submit([request])
        while not any(isinstance(e, FinishEvent) for r in reports for e in r.events):
            await asyncio.sleep(0.001)
        (end,) = finishes(await rest(submission))
        assert end.reason is FinishReason.TIMEOUT
