"""EngineWorker: the process that has the engine, when the server has not (`engine_process`).

Reads the settings, builds the engine and says so, or why not; then takes turns, and tells each.
A thread reads what is wanted meanwhile, and compiles the constraints that come as their source. The
process ends after the last turn, or at once when the server is gone.
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

from model.inference.constraints.cache import ConstraintCache
from model.inference.constraints.compiler import Compiler, Kind, Source
from model.inference.constraints.protocol import TokenConstraint
from model.inference.engine.requests import GenerationRequest
from model.inference.errors import ConstraintError
from service.engine.build import STARTUP_ERRORS, Built, build
from service.engine.driver import Add, Command, EngineTurns, Inbox
from service.engine.process import ConstrainedAdd, Ready, Refused, Told
from service.log import configure_logging
from service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")

TOGETHER_SECONDS = 0.002
"""Between two messages. Each wakes the server, which takes a processor from the model where there
are no others."""
GONE = 1
"""The exit code when the server is gone: nothing here is worth finishing then."""


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

    def __init__(self, compiler: Compiler | str, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._kept = ConstraintCache()

    def of(self, source: Source, size: int) -> TokenConstraint:
        if (constraint := self._kept.get(source)) is not None:
            return constraint
        try:
            if isinstance(self._compiler, str):
                raise ConstraintError(self._compiler)
            constraint = self._compiler.compile(source)
        except ConstraintError as error:
            return Uncompiled(source.kind, self._vocab_size, str(error))
        constraint.size = size
        self._kept.keep(constraint)
        return constraint


class Commands:
    """Hands on what the server wants, in a thread of its own; ends the process if the server is
    gone before its last command, whatever is being done then."""

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

    def _command(self, message: Command | ConstrainedAdd) -> Command:
        """What was meant; a constraint is compiled."""
        if not isinstance(message, ConstrainedAdd):
            return message
        request = message.add.request
        assert isinstance(request, GenerationRequest)
        assert self.constraints is not None
        constraint = self.constraints.of(message.source, message.size)
        params = replace(request.params, constraint=constraint)
        return Add(replace(request, params=params), message.add.arrived)


def main() -> None:
    # A manager of services may signal every process of a service; the server says when to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    settings: ServeSettings = connection.recv()
    configure_logging(settings.log_level)
    commands = Commands(connection)
    built = _build(connection, settings)
    if built is None:
        return
    config = built.engine.model_config
    commands.constraints = SourceCompiler(built.compiler, config.vocab_size)
    turns = EngineTurns(built.engine, commands.inbox)
    try:
        connection.send(Ready(built.computation, config, turns.slots))
        _take_turns(turns, connection)
    except ConnectionError:
        os._exit(GONE)
    except Exception:
        logger.exception("the engine failed")
        sys.exit(GONE)
    finally:
        turns.close()


def _build(connection: Connection, settings: ServeSettings) -> Built | None:
    """The engine; or None, and why is told."""
    try:
        return build(settings)
    except STARTUP_ERRORS as error:
        connection.send(Refused(str(error)))
    except Exception as error:
        logger.exception("cannot serve")
        connection.send(Refused(f"{type(error).__name__}: {error}"))
    return None


def _take_turns(turns: EngineTurns, connection: Connection) -> None:
    """Tell what came of each turn: at once of a prompt and of the last there is to do, of others
    together."""
    untold: list[Told] = []
    told_at = -math.inf
    while (report := turns.turn()) is not None:
        counts = replace(report.result, events=())  # its events are among the report's
        untold.append(Told(replace(report, result=counts), turns.obeyed))
        now = time.monotonic()
        waits = report.has_work and not counts.prefilled_tokens
        if not waits or now - told_at >= TOGETHER_SECONDS:
            connection.send(untold)
            untold, told_at = [], now
    connection.send(untold)
    connection.send(None)


if __name__ == "__main__":
    main()
