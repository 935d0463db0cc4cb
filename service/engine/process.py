"""EngineProcess: the engine's turns in a process of its own, seen from the server.

With the engine in a thread, every step and every token that is written take the same interpreter in
turns. That costs nothing where a step is long; a model whose steps take a millisecond, on a GPU
above all, is then waited for. In a process of its own (`engine_worker`) it has an interpreter of
its own, and what crosses are commands, and what came of the turns, over a pair of sockets.

What crosses is pickled: both ends are this program, and nobody else can reach the sockets. A
constraint cannot be, so its source goes, and it is compiled again there. The clock of both is the
system's monotonic one.

The worker ends when its socket does, however that came; a worker that ended is an engine that
failed. Not here: whose requests these are, and when the event loop is woken (`async_engine`).
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

from model.inference.constraints.compiler import Constraint, Source
from model.inference.engine.requests import GenerationRequest
from model.transformer.config import GPTConfig
from service.engine.build import Computation
from service.engine.driver import Add, Command, StepReport
from service.settings.serve import ServeSettings

ROOT = Path(__file__).parents[2]
END_SECONDS = 10.0
"""A worker that has nothing to do any more ends within this time, or is ended."""


class EngineProcessError(Exception):
    """The engine's process could not begin, or is gone; the message says why."""


@dataclass(frozen=True, slots=True)
class ConstrainedAdd:
    """`Add`, of a request whose constraint is still to be compiled; `size` as that of it here."""

    add: Add
    source: Source
    size: int


Message = Command | ConstrainedAdd | None
"""What goes to the worker, after the settings."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's first answer: the engine is there."""

    computation: Computation
    model_config: GPTConfig
    slots: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Or else: there will be none."""

    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a turn, after so many commands."""

    report: StepReport
    obeyed: int


class ProcessTurns:
    """The turns (`Turns`) of an engine in another process. Blocks until the engine is there, or
    raises EngineProcessError."""

    def __init__(self, settings: ServeSettings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.engine.worker", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the server, which drains
            )
        self._connection = Connection(ours.detach())
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="engine-commands", daemon=True)
        self._sender.start()
        self._told: deque[Told] = deque()  # received, and not taken yet
        self._lock = threading.Lock()  # of the next two
        self._sent = 0
        self._busy_since: float | None = None
        try:
            self._connection.send(_from_anywhere(settings))
            answer = self._receive()
            if isinstance(answer, Refused):
                raise EngineProcessError(answer.reason)
        except BaseException:
            self.close()
            raise
        self.computation: Computation = answer.computation
        self._ready: Ready = answer

    @property
    def model_config(self) -> GPTConfig:
        return self._ready.model_config

    @property
    def slots(self) -> int:
        return self._ready.slots

    @property
    def clock(self) -> Callable[[], float]:
        return time.monotonic

    @property
    def step_began(self) -> float | None:
        """Since when an answer is waited for, which is a little longer."""
        return self._busy_since

    def put(self, command: Command | None) -> None:
        with self._lock:
            self._sent += 1
            if self._busy_since is None:
                self._busy_since = time.monotonic()
        self._outbox.put(_portable(command))

    def turn(self) -> StepReport | None:
        while not self._told:
            if (received := self._receive()) is None:
                return None
            self._told.extend(received)
        told = self._told.popleft()
        with self._lock:
            busy = told.report.has_work or told.obeyed < self._sent
            self._busy_since = time.monotonic() if busy else None
        return told.report

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
        """What is put goes from a thread of its own: a socket may be full for a moment, and who
        puts is the event loop."""
        with contextlib.suppress(OSError):  # the worker has ended, which `turn` will tell
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)
            self._connection.send(None)


def _from_anywhere(settings: ServeSettings) -> ServeSettings:
    """Settings whose paths are right in the worker's folder too."""
    text = settings.validation_text
    return settings.model_copy(
        update={
            "checkpoint": settings.checkpoint.absolute(),
            "validation_text": None if text is None else text.absolute(),
        }
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
    return ConstrainedAdd(
        replace(command, request=request), params.constraint.source, params.constraint.size
    )
