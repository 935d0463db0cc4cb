"""The worker: the process that has the engine when the server does not (`process.py`).

Reads the settings, builds the engine, and answers that it has started or why not. Then it makes
steps and sends a report of each. A thread reads commands meanwhile, and compiles constraints from
their source. The process ends after the last command, or at once when the server is gone.
"""

import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from logitd.model.inference.constraints.cache import ConstraintCache
from logitd.model.inference.constraints.compiler import Compiler, Kind, Source
from logitd.model.inference.constraints.protocol import TokenConstraint
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.errors import ConstraintError
from logitd.service.engine.build import STARTUP_ERRORS, BuiltEngine, Unavailable, build
from logitd.service.engine.driver import Command, Inbox, LocalDriver
from logitd.service.engine.process import AddWithConstraint, Started, StartFailed, StepMessage
from logitd.service.log import configure_logging
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")

MESSAGE_INTERVAL = 0.002
"""Seconds between two messages. Each wakes the server, which takes a processor from the model where
none is free."""
GONE = 1
"""The exit code when the server is gone: nobody waits for a result."""


@dataclass(frozen=True, slots=True)
class Uncompiled:
    """A constraint that was compiled in the server and cannot be here, and its own matcher: its
    sequences end with the reason (`TokenConstraint` and `TokenMatcher` of the engine)."""

    kind: Kind
    vocab_size: int
    reason: str
    complete: bool = False

    def matcher(self) -> "Uncompiled":
        return self

    def allowed(self) -> np.ndarray:
        raise ConstraintError(self.reason)

    def advance(self, token_id: int) -> None:
        raise ConstraintError(self.reason)


class SourceCompiler:
    """Compiles what comes as its source, once for all that follow soon."""

    def __init__(self, compiler: Compiler | Unavailable, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._cache = ConstraintCache()

    def of(self, source: Source, size: int) -> TokenConstraint:
        if (constraint := self._cache.get(source)) is not None:
            return constraint
        try:
            if isinstance(self._compiler, Unavailable):
                raise ConstraintError(self._compiler.reason)
            constraint = self._compiler.compile(source)
        except ConstraintError as error:
            return Uncompiled(source.kind, self._vocab_size, str(error))
        constraint.size = size
        self._cache.put(constraint)
        return constraint


class Commands:
    """Receives the server's commands in a thread of its own. Ends the process when the server is
    gone before its last command, whatever is running then."""

    def __init__(self, connection: Connection) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.constraints: SourceCompiler | None = None  # there before the first command
        self._connection = connection
        threading.Thread(target=self._read, name="engine-commands", daemon=True).start()

    def _read(self) -> None:
        try:
            while (message := self._connection.recv()) is not None:
                self.inbox.put(self._command(message))
        except (EOFError, OSError):
            os._exit(GONE)
        self.inbox.put(None)

    def _command(self, message: Command | AddWithConstraint) -> Command:
        """The command itself; a constraint is compiled."""
        if not isinstance(message, AddWithConstraint):
            return message
        request = message.add.request
        assert isinstance(request, GenerationRequest)
        assert self.constraints is not None
        constraint = self.constraints.of(message.source, message.size)
        params = replace(request.params, constraint=constraint)
        return replace(message.add, request=replace(request, params=params))


def main() -> None:
    # A manager of services may signal every process of a service; the server says when to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    settings: ServeSettings = connection.recv()
    configure_logging(settings.log_level, json=settings.log_format == "json")
    commands = Commands(connection)
    built = _build(connection, settings)
    if built is None:
        return
    config = built.engine.model_config
    commands.constraints = SourceCompiler(built.compiler, config.vocab_size)
    driver = LocalDriver(built.engine, built.load_weights, commands.inbox)
    try:
        connection.send(Started(built.computation, config, driver.slots))
        _run_engine(driver, connection)
    except ConnectionError:
        os._exit(GONE)
    except Exception:
        logger.exception("the engine failed")
        sys.exit(GONE)
    finally:
        driver.close()


def _build(connection: Connection, settings: ServeSettings) -> BuiltEngine | None:
    """The engine; or None, and the server is sent the reason."""
    try:
        return build(settings)
    except STARTUP_ERRORS as error:
        connection.send(StartFailed(str(error)))
    except Exception as error:
        logger.exception("cannot serve")
        connection.send(StartFailed(f"{type(error).__name__}: {error}"))
    return None


def _run_engine(driver: LocalDriver, connection: Connection) -> None:
    """Make steps and report them: those of a prompt and the last before idleness at once, others
    together."""
    pending: list[StepMessage] = []
    sent_at = -math.inf
    while (report := driver.run_once()) is not None:
        counts = replace(report.result, events=())  # its events are among the report's
        pending.append(StepMessage(replace(report, result=counts), driver.commands_done))
        now = time.monotonic()
        can_wait = report.has_work and not counts.prefilled_tokens
        if not can_wait or now - sent_at >= MESSAGE_INTERVAL:
            connection.send(pending)
            pending, sent_at = [], now
    connection.send(pending)
    connection.send(None)


if __name__ == "__main__":
    main()
