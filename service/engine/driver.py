"""EngineDriver: accepts commands for an engine from any thread, and runs one step at a time.

Commands wait in an inbox. A thread of `AsyncEngine` calls `run_once`, which handles all commands,
runs a step and returns a report. If a process has several engines, a `StepThread` computes their
steps in turn. New weights are read in a separate thread while steps continue. This module knows
nothing about the event loop or HTTP.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import EngineStats, Event, FinishReason, StepResult
from logitd.model.inference.engine.requests import Request
from logitd.model.inference.engine.runner import ForwardModel, Network

logger = logging.getLogger("logitd.engine")

Result = TypeVar("Result")

Command = Callable[[], Sequence[Event] | None]
"""A call to the engine between two steps. Returns the resulting events."""

WeightsLoader = Callable[[Path, str], Network]
"""Reads the weights of the checkpoint at a path. The second argument is the SHA-256 that the
weights must have. Raises an exception if they cannot be served."""

OnCompute = Callable[[], None]
"""Called when a step begins to compute or to wait for its turn. From then on, other threads can use
the interpreter."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one `run_once`.

    events    events of the commands before the step, then events of the step
    result    token and sequence counts of the step
    seconds   duration of the step alone
    ended     time at which the step ended, on the engine's clock
    has_work  True if another step would compute something even without new commands
    weights   version of the weights with which the step was computed
    """

    events: tuple[Event, ...]
    result: StepResult
    stats: EngineStats
    seconds: float
    ended: float
    has_work: bool
    weights: int = 0


class StepThread:
    """A thread in which all engines of a process compute their steps, in order of arrival.

    Computing two steps at the same time would gain nothing, because a step uses every core. It
    would even be slower: each computing thread has its own pool of torch threads, so there would be
    more threads than processors (see `build` in `build.py`).
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")

    def call(self, work: Callable[[], Result]) -> Result:
        """Run `work` when its turn comes. Returns its result or raises its exception."""
        return self._executor.submit(work).result()

    def close(self) -> None:
        """End the thread; `call` must not be used afterwards."""
        self._executor.shutdown(wait=False)


class EngineDriver:
    """Runs one engine. `run_once` and `close` must be called by a single thread, the other methods
    by any thread."""

    def __init__(
        self, engine: Engine, load: WeightsLoader, steps: StepThread | None = None
    ) -> None:
        """`steps` computes the engine's steps; if it is None, the thread that calls `run_once`
        does."""
        self._engine = engine
        self._load = load
        self._steps = steps
        self.step_began: float | None = None  # on the monotonic clock; None between two steps
        self._prepared: ForwardModel | None = None  # loaded weights that have not taken over
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None is the last
        self._ended = False  # the last command was handled

    def now(self) -> float:
        """Current time on the engine's clock, which deadlines refer to."""
        return self._engine.clock()

    # Commands

    def add(self, request: Request, weights: int) -> None:
        """Queue a validated request for this version of the weights. The request's arrival time is
        the time of this call."""
        self._inbox.put(partial(self._engine.accept, request, self.now(), weights=weights))

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """End a request, or one of its sequences. Has no effect if it has already ended."""
        self._inbox.put(partial(self._engine.abort, request_id, index, reason))

    def grant(self, request_id: str) -> None:
        self._inbox.put(partial(self._engine.grant, request_id))

    def load_weights(self, path: Path, weights_sha256: str) -> Future[None]:
        """Load the weights of a checkpoint while the current weights stay in use. The engine's
        thread completes the returned future, with an exception if the weights cannot be served."""
        loaded: Future[None] = Future()
        threading.Thread(
            target=self._read, args=(path, weights_sha256, loaded), name="weights", daemon=True
        ).start()
        return loaded

    def swap_weights(self) -> None:
        """Switch to the loaded weights after all requests to the current weights have ended.
        `StepReport.weights` then changes."""
        self._inbox.put(self._swap)

    def stop(self) -> None:
        """Queue the last command: `run_once` handles all commands before it, then returns None."""
        self._inbox.put(None)

    # The engine's thread

    def run_once(self, on_compute: OnCompute) -> StepReport | None:
        """Wait for work, handle all commands, and run a step. Returns None after the last command.
        If the engine fails, its exception is raised, and the driver can only be closed."""
        if self._ended:
            return None
        commands = self._take_commands()
        self._ended = None in commands
        if self._steps is None:
            return self._step(commands, on_compute)
        on_compute()  # this engine may have to wait for its turn
        return self._steps.call(partial(self._step, commands, None))

    def close(self) -> None:
        """Free the weights and end the threads that compute."""
        if self._prepared is not None:
            self._prepared.close()
        self._engine.close()

    def _step(self, commands: Sequence[Command | None], on_compute: OnCompute | None) -> StepReport:
        events = [event for command in commands if command for event in command() or ()]
        self.step_began = began = time.monotonic()
        result = self._engine.step(on_compute)
        ended, self.step_began = time.monotonic(), None
        return StepReport(
            events=(*events, *result.events),
            result=result,
            stats=self._engine.stats(),
            seconds=ended - began,
            ended=self._engine.clock(),
            has_work=self._engine.has_work(),
            weights=self._engine.weights,
        )

    def _take_commands(self) -> list[Command | None]:
        """Empty the inbox; wait for the first command if the engine is idle."""
        commands: list[Command | None] = []
        try:
            if not self._engine.has_work():
                deadline = self._engine.next_deadline()  # of a paused request
                seconds = None if deadline is None else max(0.0, deadline - self.now())
                commands.append(self._inbox.get(timeout=seconds))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands

    # New weights

    def _read(self, path: Path, weights_sha256: str, loaded: Future[None]) -> None:
        """Read weights; runs in a separate thread."""
        try:
            gpt = self._load(path, weights_sha256)
        except Exception as error:  # of any kind: the current weights stay
            logger.debug("weights could not be loaded", exc_info=True)
            self._inbox.put(partial(loaded.set_exception, error))
        else:
            self._inbox.put(partial(self._prepare, gpt, loaded))

    def _prepare(self, network: Network, loaded: Future[None]) -> None:
        try:
            self._prepared = self._engine.prepare_weights(network)
        except Exception as error:  # such as too little memory
            loaded.set_exception(error)
        else:
            loaded.set_result(None)

    def _swap(self) -> None:
        assert self._prepared is not None
        self._engine.swap_weights(self._prepared)
        self._prepared = None
