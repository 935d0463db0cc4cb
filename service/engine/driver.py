"""EngineDriver: runs an engine. Commands go in, a step is made, and a report comes out.

`AsyncEngine` has a thread that calls `run_once`. `LocalDriver` computes in that thread, or in turn
with other engines (`turns.py`); `ProcessDriver` (`process.py`) has a process that does. New weights
are read in a thread of their own, so that steps go on meanwhile. Knows no event loop and no HTTP.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import EngineStats, Event, FinishReason, StepResult
from logitd.model.inference.engine.requests import Request
from logitd.model.inference.engine.runner import Passes
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT

logger = logging.getLogger("logitd.engine")


@dataclass(frozen=True, slots=True)
class Add:
    """Compute a request, which came at `arrived` on the engine's clock, with a version of the
    weights: the engine's or the next."""

    request: Request
    arrived: float
    weights: int = 0


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


@dataclass(frozen=True, slots=True)
class PrepareWeights:
    """Load the weights of a checkpoint beside those that compute. WeightsReady or WeightsRefused
    is the answer."""

    path: Path
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class SwapWeights:
    """Let the prepared weights take over when what was added for the others has ended.
    WeightsSwapped is the answer."""


Command = Add | Abort | Grant | PrepareWeights | SwapWeights


@dataclass(frozen=True, slots=True)
class WeightsReady:
    """Other weights are loaded: requests may be added for them."""


@dataclass(frozen=True, slots=True)
class WeightsRefused:
    """Other weights could not be loaded; the reason is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class WeightsSwapped:
    """Other weights compute, and those before are forgotten."""


Notice = WeightsReady | WeightsRefused | WeightsSwapped


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a LocalDriver tells itself: weights are read, or why they are not."""

    gpt: GPT | None
    reason: str = ""


Inbox = queue.SimpleQueue[Command | Loaded | None]
"""Commands in their order; None is the last."""

WeightsLoader = Callable[[Path, str], GPT]
"""Reads the weights of a checkpoint, which have that SHA-256, to take the place of those that
compute. Raises what `EXPECTED` says, and anything else for what nobody expects."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What came of one `run_once`."""

    events: tuple[Event, ...]  # of the aborts before the step, and of the step
    result: StepResult  # its counts; its events are among those above
    stats: EngineStats
    seconds: float  # the step alone
    ended: float  # on the engine's clock
    has_work: bool  # there is more to do, without another command
    notices: tuple[Notice, ...] = ()  # what became of weights


class EngineLost(Exception):
    """The engine is gone, with all that it was computing; another may be made. The message says
    why."""


OnCompute = Callable[[], None]
"""Called when a step begins to compute, or waits for that: from here on the interpreter is free
for others for a while."""


def ignore() -> None:
    """Nobody waits for the interpreter."""


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

    def run_once(self, on_compute: OnCompute = ignore) -> StepReport | None:
        """Wait until there is something to do, handle the commands, make a step. None after the
        last command. Raises what the engine fails with, and must not be called again then."""

    def close(self) -> None:
        """End what computes."""


Compute = Callable[[Callable[[], StepReport]], StepReport]
"""Calls what computes a step, in its thread and when its turn has come (`turns.py`)."""


class LocalDriver:
    """Drives an engine in the thread that calls it, or where `compute` says, if it is not alone."""

    def __init__(
        self,
        engine: Engine,
        load: WeightsLoader | None = None,
        inbox: Inbox | None = None,
        compute: Compute | None = None,
    ) -> None:
        """Without `load` the weights are those that the engine has."""
        self._compute = compute
        self._engine = engine
        self._load = load
        self._prepared: Passes | None = None
        self._notices: list[Notice] = []  # of the present `run_once`
        self._swaps = engine.weights  # that are told
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

    def run_once(self, on_compute: OnCompute = ignore) -> StepReport | None:
        """Empty the inbox, handle the commands, step."""
        if self._ended:
            return None
        commands = self._take_commands()
        self._ended = None in commands
        if self._compute is None:
            return self._step(commands, on_compute)
        on_compute()  # it may not be its turn for a while
        return self._compute(partial(self._step, commands, ignore))

    def _step(
        self, commands: Sequence[Command | Loaded | None], on_compute: OnCompute
    ) -> StepReport:
        """What computes of a `run_once`."""
        self.commands_done += sum(not isinstance(command, Loaded) for command in commands)
        events = [event for command in commands if command for event in self._handle(command)]
        self._step_began = began = time.monotonic()
        result = self._engine.step(on_compute)
        ended, self._step_began = time.monotonic(), None
        if self._swaps != self._engine.weights:
            self._swaps = self._engine.weights
            self._notices.append(WeightsSwapped())
        notices, self._notices = tuple(self._notices), []
        return StepReport(
            events=(*events, *result.events),
            result=result,
            stats=self._engine.stats(),
            seconds=ended - began,
            ended=self._engine.clock(),
            has_work=self._engine.has_work(),
            notices=notices,
        )

    def close(self) -> None:
        if self._prepared is not None:
            self._prepared.close()
        self._engine.close()

    def _take_commands(self) -> list[Command | Loaded | None]:
        """All that is in the inbox; waits for the first when the engine has nothing to do."""
        commands: list[Command | Loaded | None] = []
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

    def _handle(self, command: Command | Loaded) -> Sequence[Event]:
        match command:
            case Add(request, arrived, weights):
                self._engine.accept(request, arrived, weights=weights)
            case Abort(request_id, index, reason):
                return self._engine.abort(request_id, index, reason)
            case Grant(request_id):
                self._engine.grant(request_id)
            case PrepareWeights():
                arguments = (command, self._load)
                threading.Thread(
                    target=self._read_weights, args=arguments, name="weights", daemon=True
                ).start()
            case Loaded(gpt, reason):
                self._notices.append(self._prepare(gpt, reason))
            case SwapWeights():
                assert self._prepared is not None
                self._engine.swap_weights(self._prepared)
                self._prepared = None
        return ()

    def _read_weights(self, command: PrepareWeights, load: WeightsLoader | None) -> None:
        """In a thread of its own."""
        try:
            if load is None:
                raise LookupError("this engine was made without a way to load weights")
            loaded = Loaded(load(command.path, command.weights_sha256))
        except Exception as error:  # whatever it is, what computes goes on
            logger.debug("weights could not be loaded", exc_info=True)
            loaded = Loaded(None, str(error) or type(error).__name__)
        self._inbox.put(loaded)

    def _prepare(self, gpt: GPT | None, reason: str) -> Notice:
        """Make what computes with weights that were read."""
        if gpt is None:
            return WeightsRefused(reason)
        try:
            self._prepared = self._engine.prepare_weights(gpt)
        except Exception as error:  # memory, for one
            return WeightsRefused(str(error) or type(error).__name__)
        return WeightsReady()
