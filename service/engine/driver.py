"""EngineDriver: runs an engine. Commands go in, a step is made, and a report comes out.

`AsyncEngine` has a thread that calls `run_once`. `LocalDriver` computes in that thread,
`ProcessDriver` (`process.py`) has a process that does. Knows no event loop and no HTTP.
"""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from model.inference.engine.engine import Engine
from model.inference.engine.events import EngineStats, Event, FinishReason, StepResult
from model.inference.engine.requests import Request
from model.transformer.config import GPTConfig


@dataclass(frozen=True, slots=True)
class Add:
    """Compute a request, which came at `arrived` on the engine's clock."""

    request: Request
    arrived: float


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, or one of its sequences."""

    request_id: str
    index: int | None
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Grant:
    """Let an OutputsRequest compute one more chunk."""

    request_id: str


Command = Add | Abort | Grant
Inbox = queue.SimpleQueue[Command | None]
"""Commands in their order; None is the last."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What came of one `run_once`."""

    events: tuple[Event, ...]  # of the aborts before the step, and of the step
    result: StepResult  # its counts; its events are among those above
    stats: EngineStats
    seconds: float  # the step alone
    ended: float  # on the engine's clock
    has_work: bool  # there is more to do, without another command


class EngineLost(Exception):
    """The engine is gone, with all that it was computing; another may be made. The message says
    why."""


class EngineDriver(Protocol):
    """Drives one engine. `run_once` and `close` are for one thread, the rest for any."""

    @property
    def model_config(self) -> GPTConfig:
        """The shape of the model that computes."""

    @property
    def slots(self) -> int:
        """Sequences that can run at once."""

    @property
    def clock(self) -> Callable[[], float]:
        """The engine's clock, on which deadlines are given."""

    @property
    def step_began(self) -> float | None:
        """When the present step began, on the monotonic clock; None between two steps."""

    def put(self, command: Command | None) -> None:
        """Queue a command for the next `run_once`; None is the last one."""

    def run_once(self) -> StepReport | None:
        """Wait until there is something to do, handle the commands, make a step. None after the
        last command. Raises what the engine fails with, and must not be called again then."""

    def close(self) -> None:
        """End what computes."""


class LocalDriver:
    """Drives an engine in the thread that calls it."""

    def __init__(self, engine: Engine, inbox: Inbox | None = None) -> None:
        self._engine = engine
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self.commands_done = 0
        """Commands handled so far."""
        self._ended = False  # the last command was handled
        self._step_began: float | None = None

    @property
    def model_config(self) -> GPTConfig:
        return self._engine.model_config

    @property
    def slots(self) -> int:
        return self._engine.slots

    @property
    def clock(self) -> Callable[[], float]:
        return self._engine.clock

    @property
    def step_began(self) -> float | None:
        return self._step_began

    def put(self, command: Command | None) -> None:
        self._inbox.put(command)

    def run_once(self) -> StepReport | None:
        """Empty the inbox, handle the commands, step."""
        if self._ended:
            return None
        commands = self._take_commands()
        self._ended = None in commands
        self.commands_done += len(commands)
        events = [event for command in commands if command for event in self._handle(command)]
        self._step_began = began = time.monotonic()
        result = self._engine.step()
        ended, self._step_began = time.monotonic(), None
        return StepReport(
            events=(*events, *result.events),
            result=result,
            stats=self._engine.stats(),
            seconds=ended - began,
            ended=self._engine.clock(),
            has_work=self._engine.has_work(),
        )

    def close(self) -> None:
        self._engine.close()

    def _take_commands(self) -> list[Command | None]:
        """All that is in the inbox; waits for the first when the engine has nothing to do."""
        commands = []
        try:
            if not self._engine.has_work():
                commands.append(self._inbox.get(timeout=self._wait_timeout()))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands

    def _wait_timeout(self) -> float | None:
        """Seconds until the deadline of a paused request; None when there is none."""
        deadline = self._engine.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._engine.clock())

    def _handle(self, command: Command) -> Sequence[Event]:
        match command:
            case Add(request, arrived):
                self._engine.add(request, arrived)
            case Abort(request_id, index, reason):
                return self._engine.abort(request_id, index, reason)
            case Grant(request_id):
                self._engine.grant(request_id)
        return ()
