"""EngineDriver and StepThread: when others may have the interpreter, and whose turn it is. What a
driver computes is tested with the engine and with `AsyncEngine`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.runner import StepOutput
from logitd.model.inference.engine.scheduler import StepPlan
from logitd.service.engine.driver import EngineDriver, Result, StepThread
from tests.service.engine.harness import TINY, generation, no_weights


def order_of_step(steps_of: Callable[[list[str]], StepThread | None]) -> list[str]:
    """The order of events in a step: "free" is when others may have the interpreter."""
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
    return order


def test_an_engine_alone_prepares_its_step_before_others_get_the_interpreter() -> None:
    """The event loop took it as soon as a step was done, and every core waited until the tokens
    were written: one stream of a 124M model was 3 % slower."""
    assert order_of_step(lambda order: None) == ["plans", "free", "computes"]


def test_one_of_several_gives_it_up_before_it_waits_for_its_turn() -> None:
    class Watched(StepThread):
        def __init__(self, order: list[str]) -> None:
            super().__init__()
            self._order = order

        def call(self, work: Callable[[], Result]) -> Result:
            self._order.append("waits")
            result = super().call(work)
            self.close()
            return result

    assert order_of_step(Watched) == ["free", "waits", "plans", "computes"]


@contextmanager
def steps() -> Iterator[StepThread]:
    thread = StepThread()
    try:
        yield thread
    finally:
        thread.close()


def test_steps_are_computed_in_one_thread_one_at_a_time() -> None:
    threads, inside, most = set(), 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threads.add(threading.current_thread())
        inside -= 1

    with steps() as thread:
        callers = [
            threading.Thread(target=lambda: [thread.call(work) for _ in range(200)])
            for _ in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert most == 1
    assert len(threads) == 1
    assert threads.isdisjoint(callers)


def test_an_engine_that_computes_again_queues_behind_those_that_wait() -> None:
    order: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait()
        order.append("first")

    with steps() as thread:

        def first() -> None:
            thread.call(hold)
            thread.call(lambda: order.append("first again"))

        callers = [threading.Thread(target=first)]
        callers[0].start()
        begun.wait()
        for name in ("second", "third"):
            size = thread._executor._work_queue.qsize()
            caller = threading.Thread(target=thread.call, args=(lambda n=name: order.append(n),))
            caller.start()
            callers.append(caller)
            while thread._executor._work_queue.qsize() == size:
                pass
        go.set()
        for caller in callers:
            caller.join()
    assert order == ["first", "second", "third", "first again"]


def test_an_exception_is_raised_in_the_caller_and_the_thread_goes_on() -> None:
    def broken() -> None:
        raise KeyError("of this one")

    with steps() as thread:
        with pytest.raises(KeyError, match="of this one"):
            thread.call(broken)
        assert thread.call(lambda: 5) == 5


def test_the_thread_ends_when_it_is_closed() -> None:
    with steps() as thread:
        named = thread.call(threading.current_thread)
    named.join(10)
    assert not named.is_alive()
