"""EngineDriver: commands for an engine, and one step at a time.

Commands may come from any thread and wait in an inbox. One thread of `AsyncEngine` calls
`run_once`, which handles them, makes a step and reports it. The steps of several engines are
computed in turn in a `StepThread`. New weights are read in a thread of their own while steps go on.
Knows no event loop and no HTTP.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import EngineStats, Event, FinishReason, StepResult
from logitd.model.inference.engine.requests import Request
from logitd.model.inference.engine.runner import ForwardModel
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT

logger = logging.getLogger("logitd.engine")

Result = TypeVar("Result")

Command = Callable[[], Sequence[Event] | None]
"""A call of the engine, made between two steps; it returns the events it caused."""

WeightsLoader = Callable[[Path, str], GPT]
"""Reads the weights of a checkpoint, given its path and their SHA-256. Any exception is reported as
the reason why they cannot be served."""

OnCompute = Callable[[], None]
"""Called when a step begins to compute, or waits for its turn: from then on the interpreter is free
for other threads for a while."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of one `run_once`.

    events    of the commands before the step, and of the step
    result    counts of the step; its events are among those above
    seconds   the step alone
    ended     on the engine's clock
    has_work  another step would do something, without another command
    weights   version that the engine computes with
    """

    events: tuple[Event, ...]
    result: StepResult
    stats: EngineStats
    seconds: float
    ended: float
    has_work: bool
    weights: int = 0


class StepThread:
    """A thread in which the engines of one process compute, a step each in order of arrival.

    Two engines at once would gain nothing, since a step uses every core, and would slow each other
    down: torch keeps a pool of threads for each thread that computes, and with more pool threads
    than processors all of them sleep between any two operations (`build.py` has the measure).
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")

    def call(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, or raise its exception, once its turn has come."""
        return self._executor.submit(work).result()

    def close(self) -> None:
        """End the thread. `call` must not be used afterwards."""
        self._executor.shutdown(wait=False)


class EngineDriver:
    """Drives one engine. `run_once` and `close` are for one thread, all the rest for any."""

    def __init__(
        self, engine: Engine, load: WeightsLoader, steps: StepThread | None = None
    ) -> None:
        """Steps are computed in `steps`, or else in the thread that calls `run_once`."""
        self._engine = engine
        self._load = load
        self._steps = steps
        self._prepared: ForwardModel | None = None  # with loaded weights that have not taken over
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None is the last
        self._ended = False  # the last command was handled
        self._step_began: float | None = None

    @property
    def model_config(self) -> GPTConfig:
        """The shape of the model."""
        return self._engine.model_config

    @property
    def slots(self) -> int:
        """Number of sequences that can run at once."""
        return self._engine.slots

    @property
    def step_began(self) -> float | None:
        """Start of the present step on the monotonic clock; None between two steps."""
        return self._step_began

    def now(self) -> float:
        """The time on the engine's clock, on which deadlines are given."""
        return self._engine.clock()

    # Commands

    def add(self, request: Request, weights: int) -> None:
        """Compute a checked request that arrived now, with this version of the weights."""
        self._inbox.put(partial(self._engine.accept, request, self.now(), weights=weights))

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """End a request or one of its sequences; harmless if it has ended."""
        self._inbox.put(partial(self._engine.abort, request_id, index, reason))

    def grant(self, request_id: str) -> None:
        """Let an OutputsRequest compute one more chunk."""
        self._inbox.put(partial(self._engine.grant, request_id))

    def load_weights(
        self, path: Path, weights_sha256: str, on_loaded: Callable[[str | None], None]
    ) -> None:
        """Load the weights of a checkpoint next to the present ones. `on_loaded` is then called
        once, in the engine's thread, with None or with the reason why they cannot be served."""
        threading.Thread(
            target=self._read, args=(path, weights_sha256, on_loaded), name="weights", daemon=True
        ).start()

    def swap_weights(self) -> None:
        """Let the loaded weights take over when all requests of the present ones have ended, which
        `StepReport.weights` tells."""
        self._inbox.put(self._swap)

    def stop(self) -> None:
        """Give the last command: `run_once` handles those before it and then returns None."""
        self._inbox.put(None)

    # The engine's thread

    def run_once(self, on_compute: OnCompute) -> StepReport | None:
        """Wait until there is something to do, handle all commands, make a step. Return None after
        the last command. Raises what the engine fails with, and must not be called again then."""
        if self._ended:
            return None
        commands = self._take_commands()
        self._ended = None in commands
        if self._steps is None:
            return self._step(commands, on_compute)
        on_compute()  # its turn may not come for a while
        return self._steps.call(partial(self._step, commands, None))

    def close(self) -> None:
        """End the threads that compute."""
        if self._prepared is not None:
            self._prepared.close()
        self._engine.close()

    def _step(self, commands: Sequence[Command | None], on_compute: OnCompute | None) -> StepReport:
        events = [event for command in commands if command for event in command() or ()]
        self._step_began = began = time.monotonic()
        result = self._engine.step(on_compute)
        ended, self._step_began = time.monotonic(), None
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
        """Empty the inbox; wait for the first command if the engine has nothing to do."""
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

    def _read(
        self, path: Path, weights_sha256: str, on_loaded: Callable[[str | None], None]
    ) -> None:
        """Read weights, in a thread of their own."""
        try:
            gpt = self._load(path, weights_sha256)
        except Exception as error:  # the present weights go on, whatever it is
            logger.debug("weights could not be loaded", exc_info=True)
            self._inbox.put(partial(on_loaded, _reason(error)))
        else:
            self._inbox.put(partial(self._prepare, gpt, on_loaded))

    def _prepare(self, gpt: GPT, on_loaded: Callable[[str | None], None]) -> None:
        try:
            self._prepared = self._engine.prepare_weights(gpt)
        except Exception as error:  # such as too little memory
            on_loaded(_reason(error))
        else:
            on_loaded(None)

    def _swap(self) -> None:
        assert self._prepared is not None
        self._engine.swap_weights(self._prepared)
        self._prepared = None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
