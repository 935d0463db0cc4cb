"""EngineDriver and StepThread: the order of the work within a step, and several engines that take
turns. A driver's results are tested with the engine and with `AsyncEngine`.
"""

import threading
from collections.abc import Callable

import pytest

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.runner import StepOutput
from logitd.model.inference.engine.scheduler import StepPlan
from logitd.service.engine.driver import EngineDriver, Result, StepThread
from tests.service.engine.harness import TINY, generation, no_weights


class Recording(StepThread):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self._order = order

    def call(self, work: Callable[[], Result]) -> Result:
        self._order.append("waits")
        result = super().call(work)
        self.close()
        return result


@pytest.mark.parametrize(
    ("steps_of", "expected"),
    [
        # The event loop used to take the interpreter as soon as a step was done, and every core
        # waited until the tokens were written: a stream of a 124M model was 3 % slower.
        (lambda order: None, ["plans", "free", "computes"]),
        (Recording, ["free", "waits", "plans", "computes"]),
    ],
    ids=["alone", "one of several"],
)
def test_step_releases_the_interpreter(
    steps_of: Callable[[list[str]], StepThread | None], expected: list[str]
) -> None:
    """The entry "free" marks the moment from which other threads can run Python code."""
    order: list[str] = []
    engine = Engine(TINY, EngineConfig(slots=1))
    plan, run = engine._scheduler.plan, engine._runner.run

    def planning(now: float) -> StepPlan:
        order.append("plans")
        return plan(now)

    def running(plan: StepPlan) -> StepOutput:
        order.append("computes")
        return run(plan)

    engine._scheduler.plan = planning  # type: ignore[method-assign]
    engine._runner.run = running  # type: ignore[method-assign]
    driver = EngineDriver(engine, no_weights, steps_of(order))
    driver.add(generation("a"), weights=0)
    driver.run_once(lambda: order.append("free"))
    driver.close()
    assert order == expected


def test_step_thread_runs_one_step_at_a_time_in_one_thread() -> None:
    """An exception in one caller's step does not affect the others."""
    threads, inside, most, failures = set[threading.Thread](), 0, 0, 0
    steps = StepThread()

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threads.add(threading.current_thread())
        inside -= 1
        raise KeyError

    def call() -> None:
        nonlocal failures
        for _ in range(200):
            with pytest.raises(KeyError):
                steps.call(work)
            failures += 1

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    steps.close()
    assert (most, len(threads)) == (1, 1)
    assert failures > 200
    (thread,) = threads
    assert thread not in callers
    thread.join(10)
    assert not thread.is_alive()
