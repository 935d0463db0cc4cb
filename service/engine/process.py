"""ProcessDriver: drives an engine that runs in a process of its own.

A thread shares its interpreter with the event loop. That costs little where a step is long, but a
model whose steps take a millisecond, as on a GPU, waits while tokens are written. A second process
(`worker.py`) has an interpreter of its own. Commands and step reports cross over a pair of sockets.

They are pickled: both ends are this program, and nobody else can reach the sockets. A constraint
cannot be pickled, so its source is sent and compiled again there. Both processes read the system's
monotonic clock.

The worker ends when its socket is closed, for whatever reason. A worker that has ended is an engine
that is lost (`restarts.py`). Not here: whose requests these are (`async_engine.py`), and when the
event loop is woken (`wakeup.py`).
"""

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from logitd.model.inference.constraints.compiler import Constraint, Source
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.transformer.config import GPTConfig
from logitd.service.engine.build import Computation
from logitd.service.engine.driver import Add, Command, EngineLost, OnCompute, StepReport, ignore
from logitd.service.settings.serve import ServeSettings

ROOT = Path(__file__).parents[3]
END_SECONDS = 10.0
"""Seconds within which a worker ends by itself before it is killed."""


class EngineProcessError(EngineLost):
    """The engine's process could not begin, or is gone; the message says why."""


@dataclass(frozen=True, slots=True)
class AddWithConstraint:
    """`Add`, of a request whose constraint is still to be compiled; `size` as that of it here."""

    add: Add
    source: Source
    size: int


Message = Command | AddWithConstraint | None
"""What goes to the worker, after the settings."""


@dataclass(frozen=True, slots=True)
class Started:
    """The worker's first answer: the engine is there."""

    computation: Computation
    model_config: GPTConfig
    slots: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The worker's other first answer: there will be no engine."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepMessage:
    """The report of a step, and how many commands were handled by then."""

    report: StepReport
    commands_done: int


class ProcessDriver:
    """An `EngineDriver` whose engine runs in another process. Blocks until the engine has started,
    or raises EngineProcessError."""

    def __init__(self, settings: ServeSettings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "logitd.service.engine.worker", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the server, which drains
            )
        self._connection = Connection(ours.detach())
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="engine-commands", daemon=True)
        self._sender.start()
        self._pending: deque[StepMessage] = deque()  # received, not returned yet
        self._lock = threading.Lock()  # of the next two
        self._sent = 0
        self._busy_since: float | None = None
        try:
            self._connection.send(_from_anywhere(settings))
            answer = self._receive()
            if isinstance(answer, StartFailed):
                raise EngineProcessError(answer.reason)
        except BaseException:
            self.close()
            raise
        self.computation: Computation = answer.computation
        self._started: Started = answer

    @property
    def model_config(self) -> GPTConfig:
        return self._started.model_config

    @property
    def slots(self) -> int:
        return self._started.slots

    @property
    def clock(self) -> Callable[[], float]:
        return time.monotonic

    @property
    def step_began(self) -> float | None:
        """Since when an answer is awaited: a little before the step itself."""
        return self._busy_since

    def put(self, command: Command | None) -> None:
        with self._lock:
            self._sent += 1
            if self._busy_since is None:
                self._busy_since = time.monotonic()
        self._outbox.put(_portable(command))

    def run_once(self, on_compute: OnCompute = ignore) -> StepReport | None:
        if not self._pending:
            on_compute()  # over there
        while not self._pending:
            if (received := self._receive()) is None:
                return None
            self._pending.extend(received)
        message = self._pending.popleft()
        with self._lock:
            busy = message.report.has_work or message.commands_done < self._sent
            self._busy_since = time.monotonic() if busy else None
        return message.report

    def close(self) -> None:
        """End the worker, by ending the connection if it has not ended by itself."""
        self._outbox.put(None)
        self._sender.join(END_SECONDS)
        self._connection.close()
        self._exit_code()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineProcessError(
                f"the engine's process ended with {self._exit_code()}; what it said is in the log"
            ) from error

    def _exit_code(self) -> int:
        """Of the worker, which has ended or is about to."""
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _send(self) -> None:
        """Send what was put, in a thread of its own: a socket may be full for a moment, and `put`
        is called on the event loop."""
        with contextlib.suppress(OSError):  # the worker has ended, which `run_once` reports
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)
            self._connection.send(None)


def _from_anywhere(settings: ServeSettings) -> ServeSettings:
    """Settings whose paths are right in the worker's folder too."""
    text, source = settings.validation_text, settings.source
    return settings.of(
        replace(source, path=source.path.absolute()),
        validation_text=None if text is None else text.absolute(),
    )


def _portable(command: Command | None) -> Message:
    """A command as it can be pickled."""
    if not isinstance(command, Add) or not isinstance(command.request, GenerationRequest):
        return command
    params = command.request.params
    if params.constraint is None:
        return command
    assert isinstance(params.constraint, Constraint)
    request = replace(command.request, params=replace(params, constraint=None))
    return AddWithConstraint(
        replace(command, request=request), params.constraint.source, params.constraint.size
    )
