"""StepThread: the thread in which several engines of one process compute, a step each in turn.

Two engines at once would gain nothing, since a step uses every core, and would be in each other's
way: torch keeps a pool of threads for each thread that computes, and with more of them than
processors all sleep between any two operations (`build.py` has the measure). In turn, each step
finds the machine as that of an engine alone does.

An engine waits for its commands in a thread of its own (`driver.py`) and comes here with whatever
computes. First come, first served: an engine that has work has one step here at a time, so none
computes twice while another waits. An engine alone needs none of this.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class StepThread:
    """Runs what it is given, one thing after another, in one thread, until it is closed."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._work = queue.SimpleQueue()
        # A daemon, so that a process that must die is not kept by a step.
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    def call(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, once its turn has come; what it raises is raised here."""
        future: Future[Result] = Future()
        self._work.put((work, future))
        return future.result()

    def close(self) -> None:
        """End the thread. Nothing may be called afterwards."""
        self._work.put(None)

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            _do(*given)
            del given  # what was computed is not kept while nothing is


def _do(work: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
