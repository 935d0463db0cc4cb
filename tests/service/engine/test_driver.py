"""LocalDriver: when it says that others may have the interpreter. What it computes is tested with
the engine and with `AsyncEngine`."""

from collections.abc import Callable

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.runner import StepOutput
from logitd.model.inference.engine.scheduler import StepPlan
from logitd.service.engine.driver import Add, LocalDriver, StepReport
from tests.service.engine.harness import TINY, generation


def told_in_order(driver_of: Callable[[Engine, list[str]], LocalDriver]) -> list[str]:
    """What happens in a step: "free" is when others may have the interpreter."""
    told: list[str] = []
    engine = Engine(TINY, EngineConfig(slots=1))
    plan, run = engine._scheduler.plan, engine._runner.run

    def planning(now: float) -> StepPlan:
        told.append("plans")
        return plan(now)

    def running(plan: StepPlan) -> StepOutput:
        told.append("computes")
        return run(plan)

    engine._scheduler.plan = planning  # type: ignore[method-assign]
    engine._runner.run = running  # type: ignore[method-assign]
    driver = driver_of(engine, told)
    driver.put(Add(generation("a"), arrived=engine.clock()))
    driver.run_once(lambda: told.append("free"))
    driver.close()
    return told


def test_an_engine_alone_prepares_its_step_before_others_get_the_interpreter() -> None:
    """The event loop took it as soon as a step was done, and every core waited until the tokens
    were written: one stream of a 124M model was 3 % slower."""
    assert told_in_order(lambda engine, told: LocalDriver(engine)) == ["plans", "free", "computes"]


def test_one_of_several_gives_it_up_before_it_waits_for_its_turn() -> None:
    def in_turn(engine: Engine, told: list[str]) -> LocalDriver:
        def compute(step: Callable[[], StepReport]) -> StepReport:
            told.append("waits")
            return step()

        return LocalDriver(engine, compute=compute)

    assert told_in_order(in_turn) == ["free", "waits", "plans", "computes"]
