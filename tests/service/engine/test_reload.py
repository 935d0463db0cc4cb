"""AsyncEngine replaces its weights: each request is answered by one version, or gets an error."""

import asyncio
import threading
from pathlib import Path

import pytest

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import Event, FinishEvent, FinishReason, TokenEvent
from logitd.model.inference.reference import generate
from logitd.model.transformer.gpt import GPT
from logitd.service.engine.async_engine import ReloadError
from logitd.service.engine.session import EngineSession
from logitd.service.engine.submission import REPLACED, EngineStopped, Submission
from tests.model.factories import tiny_gpt
from tests.service.engine.harness import GatedEngine, generation, reserved, running
from tests.service.serving import TEST_TIMEOUT

OLD, NEW = tiny_gpt(seed=1), tiny_gpt(seed=2)
PATH = Path("new")


def engine() -> GatedEngine:
    return GatedEngine(OLD, EngineConfig(slots=2))


def load(path: Path, weights_sha256: str) -> GPT:
    assert (path, weights_sha256) == (PATH, "hash")
    return NEW


async def finished(submission: Submission) -> tuple[list[int], FinishReason]:
    events: list[Event] = []
    while not submission.finished:
        events += await submission.take()
    (end,) = [event for event in events if isinstance(event, FinishEvent)]
    return [event.token_id for event in events if isinstance(event, TokenEvent)], end.reason


def expected(gpt: GPT, name: str, tokens: int = 5) -> list[int]:
    request = generation(name, tokens)
    return generate(gpt, request.token_ids, request.params)


async def test_session_keeps_its_weights_until_it_is_closed() -> None:
    async with running(engine(), load=load) as (owner, _):
        session, other = EngineSession(owner), EngineSession(owner)
        first = session.submit([generation("first")], more=True)
        assert await finished(first) == (expected(OLD, "first"), FinishReason.LENGTH)
        reloading = asyncio.create_task(owner.reload(PATH, "hash", TEST_TIMEOUT))
        while not owner.version:
            await asyncio.sleep(0.001)
        assert (session.version, other.version) == (0, 1)
        held = other.submit([generation("held")])
        second = session.submit([generation("second")], more=True)
        assert await finished(second) == (expected(OLD, "second"), FinishReason.LENGTH)
        assert not reloading.done()
        session.close()
        await reloading
        assert await finished(held) == (expected(NEW, "held"), FinishReason.LENGTH)


async def test_session_open_after_the_timeout_is_refused() -> None:
    async with running(engine(), load=load) as (owner, _):
        session = EngineSession(owner)
        session.submit([generation("first")], more=True)
        reservation = reserved(owner, [generation("a"), generation("b")])
        reservation.submit_next()
        await owner.reload(PATH, "hash", 0.05)
        with pytest.raises(EngineStopped, match=REPLACED):
            session.submit([generation("late")], more=True)
        with pytest.raises(EngineStopped, match=REPLACED):
            reservation.submit_next()
        reservation.close()
        session.close()
        new = owner.submit([generation("new")])
        assert await finished(new) == (expected(NEW, "new"), FinishReason.LENGTH)


async def test_reload_timeout_ends_running_requests() -> None:
    """A request cannot be submitted to weights that are about to be dropped. Such a request once
    ended the engine."""

    gated = engine()
    async with running(gated, load=load) as (owner, _):
        session = EngineSession(owner)
        long = session.submit([generation("long", 100)], more=True)
        waiting = [owner.submit([generation(f"waiting {i}", 100)]) for i in range(3)]
        reloading = asyncio.create_task(owner.reload(PATH, "hash", 0.01))
        while not owner.version:
            await asyncio.sleep(0)
        gated.gate.clear()
        await asyncio.sleep(0.05)  # after the timeout; the engine does not know yet
        with pytest.raises(EngineStopped, match=REPLACED):
            session.submit([generation("late")], more=True)
        gated.gate.set()
        await reloading
        ends = [(await finished(submission))[1] for submission in (long, *waiting)]
        assert FinishReason.REPLACED in ends
        assert set(ends) <= {FinishReason.REPLACED, FinishReason.LENGTH}
        session.close()


async def test_cancelled_reload_continues_and_excludes_others() -> None:
    go = threading.Event()

    def wait_and_load(path: Path, weights_sha256: str) -> GPT:
        assert go.wait(TEST_TIMEOUT)
        return load(path, weights_sha256)

    async with running(engine(), load=wait_and_load) as (owner, _):
        reloading = asyncio.create_task(owner.reload(PATH, "hash", TEST_TIMEOUT))
        await asyncio.sleep(0)
        reloading.cancel()
        session = EngineSession(owner)
        await finished(session.submit([generation("first")], more=True))
        with pytest.raises(ReloadError, match="another checkpoint is being loaded"):
            await owner.reload(PATH, "hash", TEST_TIMEOUT)
        go.set()
        while not owner.version:
            await asyncio.sleep(0.001)
        old, new = session.submit([generation("old")]), owner.submit([generation("new")])
        with pytest.raises(ReloadError, match="another checkpoint is being loaded"):
            await owner.reload(PATH, "hash", TEST_TIMEOUT)
        assert await finished(old) == (expected(OLD, "old"), FinishReason.LENGTH)
        assert await finished(new) == (expected(NEW, "new"), FinishReason.LENGTH)
        await owner.reload(PATH, "hash", TEST_TIMEOUT)
        assert owner.version == 2


class Full(Engine):
    def prepare_weights(self, gpt: GPT) -> None:  # type: ignore[override]
        raise MemoryError("of the device")


async def test_weights_that_do_not_fit_change_nothing() -> None:
    async with running(Full(OLD, EngineConfig(slots=2)), load=load) as (owner, _):
        with pytest.raises(ReloadError, match="of the device"):
            await owner.reload(PATH, "hash", TEST_TIMEOUT)
        assert owner.version == 0
        old = owner.submit([generation("old")])
        assert await finished(old) == (expected(OLD, "old"), FinishReason.LENGTH)


async def test_stopping_engine_ends_a_reload_and_refuses_others() -> None:
    async with running(engine(), load=load) as (owner, _):
        session = EngineSession(owner)
        session.submit([generation("old", 1)], more=True)
        reloading = asyncio.create_task(owner.reload(PATH, "hash", TEST_TIMEOUT))
        while not owner.version:
            await asyncio.sleep(0.001)
        held = owner.submit([generation("held")])
        await owner.stop(0.05)
        with pytest.raises(ReloadError, match="shutting down"):
            await reloading
        assert (await finished(held))[1] is FinishReason.ABORT
        with pytest.raises(ReloadError, match="shutting down"):
            await owner.reload(PATH, "hash", TEST_TIMEOUT)
        session.close()
