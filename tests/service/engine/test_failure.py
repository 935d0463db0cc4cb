"""AsyncEngine fails: every client gets an error, no computed token is lost, and a hanging step is
reported."""

import asyncio
from collections.abc import Callable

import pytest

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import StepResult
from logitd.service.engine.admission import AdmissionController
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.driver import EngineDriver, OnCompute
from logitd.service.engine.submission import EngineStopped, Submission
from logitd.service.engine.usage import Usage
from tests.service.engine.harness import (
    LIMITS,
    TINY,
    all_rows,
    generation,
    no_weights,
    reserved,
    rest,
    running,
    tiny,
    token_ids,
)
from tests.service.serving import TEST_TIMEOUT


class BrokenEngine(Engine):
    """Fails in the fourth step."""

    steps = 0

    def step(self, on_compute: OnCompute | None = None) -> StepResult:
        self.steps += 1
        if self.steps == 4:
            raise ZeroDivisionError("a secret of the engine")
        return super().step(on_compute)


def broken() -> AsyncEngine:
    engine = BrokenEngine(TINY, EngineConfig(slots=2))
    return AsyncEngine(
        EngineDriver(engine, no_weights),
        AdmissionController(engine.model_config, 2, LIMITS),
        stall_timeout=TEST_TIMEOUT,
        on_step=lambda report: None,
    )


async def test_hanging_step_is_reported_as_stalled() -> None:
    engine = tiny()
    async with running(engine, stall_timeout=0.05) as (owner, _):
        assert owner.stalled() is None, "an idle engine is not stalled"
        engine.gate.clear()
        submission = owner.submit([generation("a")])
        while owner.stalled() is None:
            await asyncio.sleep(0.01)
        engine.gate.set()
        await rest(submission)
        assert owner.stalled() is None


async def test_failed_engine_ends_every_submission(logged_errors: list[str]) -> None:
    owner = broken()
    # One running, one waiting for a slot, and one whose events were not taken.
    submissions = [owner.submit([generation(name, 50)]) for name in "ab"]
    submissions.append(owner.submit([all_rows("c", 9)]))
    reservation = reserved(owner, [all_rows("rows", 9)])
    told = await asyncio.gather(*map(rest, submissions), return_exceptions=True)
    assert [type(one) for one in told] == [EngineStopped] * 3
    assert owner.failure is not None
    assert (owner.admission.sequences, owner.admission.elements) == (1, 9 * 257), (
        "of the reservation"
    )
    attempts: list[Callable[[], Submission]] = [
        lambda: owner.submit([generation("late")]),
        reservation.submit_next,
    ]
    for attempt in attempts:
        with pytest.raises(EngineStopped) as caught:
            attempt()
        assert "secret" not in str(caught.value), "the reason is for the log only"
    reservation.close()
    assert owner.admission.elements == 0
    await owner.stop(TEST_TIMEOUT)
    assert len(logged_errors) == 1
    assert "a secret of the engine" in logged_errors[0]
    logged_errors.clear()


async def test_failed_engine_settles_the_usage_of_several_prompts(logged_errors: list[str]) -> None:
    owner, usage, told = broken(), Usage(), list[str]()
    submission = owner.submit([generation(name, 50) for name in "ab"], usage=usage)
    with pytest.raises(EngineStopped):
        await rest(submission)
    usage.when_settled(lambda: told.append("settled"))
    assert (told, usage.open, usage.lost) == (["settled"], 0, True)
    await owner.stop(TEST_TIMEOUT)
    logged_errors.clear()


async def test_failed_engine_delivers_computed_tokens(logged_errors: list[str]) -> None:
    owner = broken()
    submission = owner.submit([generation("a", 50)])
    while owner.failure is None:
        await asyncio.sleep(0)
    events = await submission.take()
    assert len(token_ids(events, "a")) >= 2
    with pytest.raises(EngineStopped):
        await submission.take()
    await owner.stop(TEST_TIMEOUT)
    logged_errors.clear()


async def test_engine_that_fails_to_close_still_stops(
    logged_errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny()

    def close() -> None:
        raise OSError("the folder of the process is gone")

    monkeypatch.setattr(engine, "close", close)
    async with asyncio.timeout(TEST_TIMEOUT), running(engine) as (owner, _):
        await rest(owner.submit([generation("a")]))
    assert "the folder of the process is gone" in "".join(logged_errors)
    logged_errors.clear()
