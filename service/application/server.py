"""Server: runs the application in uvicorn, and handles signals.

After SIGTERM or SIGINT, the readiness check answers 503, and `drain_grace` seconds later new
requests are rejected. Running requests then have `drain_timeout` seconds to finish; after that they
are aborted with an error. Then the process exits with 0. If the signal arrives while models are
being loaded, the process exits with 0 immediately. A second signal ends the process immediately,
with 128 plus the signal's number. SIGHUP only reads the API keys again. If an engine fails, the
process exits with 1, so that a supervisor can restart it.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any

import uvicorn

from logitd.service.access.auth import ApiKeyError
from logitd.service.application.app import create_app
from logitd.service.connections.open_connections import ConnectionLimitError, OpenConnections
from logitd.service.connections.protocol import Connection
from logitd.service.log import configure_logging
from logitd.service.models.served import Models, ServedModel
from logitd.service.models.state import ServiceState
from logitd.service.settings.serve import ServeSettings
from logitd.service.tracing.traces import TracesError

logger = logging.getLogger("logitd")


Announce = Callable[[Models, int], None]
"""Called with the models and the port as soon as requests are answered."""


class Server(uvicorn.Server):
    """uvicorn's server. It also announces that it is ready, and drains before it exits."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServiceState,
        connections: OpenConnections,
        announce: Announce,
    ) -> None:
        super().__init__(config)
        self._state = state
        self._connections = connections
        self._announce = announce
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loading = ", ".join(map(str, self._state.settings.models))
        logger.info("listening on port %d, loading %s", self._port, loading)
        self._start(self._announce_when_ready())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's signal handlers, which raise the signal again after a clean stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # blocked by `postpone_hangups`
        yield

    def _on_hangup(self) -> None:
        if not self._state.keys.names:
            logger.warning("SIGHUP: this server has no API keys to read again")
            return
        try:
            names = self._state.read_keys_again()
            logger.info("SIGHUP: the keys of %s are accepted now", ", ".join(names))
        except ApiKeyError as error:
            logger.error("SIGHUP: the old keys stay: %s", error)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            logger.warning("%s again: quitting immediately", signal.Signals(number).name)
            os._exit(128 + number)
        if not self._state.settled.is_set():
            # No request was accepted yet, and native code during loading cannot be interrupted.
            logger.info("%s while loading: quitting immediately", signal.Signals(number).name)
            os._exit(0)
        grace = self._state.settings.drain_grace
        if grace:
            logger.info("%s: no longer ready, draining in %g s", signal.Signals(number).name, grace)
        else:
            logger.info("%s: draining", signal.Signals(number).name)
        self._start(self._drain_then_exit(grace))

    @property
    def _port(self) -> int:
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    async def _announce_when_ready(self) -> None:
        await self._state.settled.wait()
        models = self._state.models
        if not models.served:
            self.should_exit = True  # loading failed
            return
        self._announce(models, self._port)
        failed = await self._first_failed(models)
        engine = f"the engine of {failed.name}" if models.several else "the engine"
        logger.error("%s failed: exiting with 1", engine)
        self.should_exit = True

    async def _first_failed(self, models: Models) -> ServedModel:
        """Wait until an engine fails. Returns its model."""
        waiting = [asyncio.ensure_future(served.engine.failed.wait()) for served in models.served]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiting:
                waiter.cancel()
        return next(served for served in models.served if served.engine.failed.is_set())

    async def _drain_then_exit(self, grace: float) -> None:
        self._state.leave()
        await asyncio.sleep(grace)
        now = asyncio.get_running_loop().time()
        self._connections.reply_deadline = now + self._state.settings.drain_timeout
        await self._state.drain()
        self.should_exit = True

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run a task, and keep a reference to it, because the event loop keeps only a weak one."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def uvicorn_config(
    app: Any, settings: ServeSettings, connections: OpenConnections
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=partial(Connection, connections=connections),  # type: ignore[arg-type]
        ws="none",
        backlog=connections.backlog,
        log_config=None,
        access_log=False,
        server_header=False,
        # `Connection.shutdown` ends them earlier.
        timeout_graceful_shutdown=ceil(settings.drain_timeout) + 5,
    )


def serve(settings: ServeSettings, announce: Announce) -> int:
    """Run until a signal ends the server. Returns the exit code of the process."""
    configure_logging(settings.log_level, json=settings.log_format == "json")
    try:
        app = create_app(settings)
        state: ServiceState = app.state.service
        connections = OpenConnections(settings, state.metrics)
    except (ApiKeyError, TracesError, ConnectionLimitError) as error:
        logger.error("cannot serve: %s", error)
        return 1
    config = uvicorn_config(app, settings, connections)
    server = Server(config, state, connections, announce)
    logging.getLogger("uvicorn.error").addFilter(_is_no_bind_error)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        try:
            runner.run(server.serve())
        except SystemExit as end:  # from uvicorn, which could not bind
            logger.error("cannot serve: %s", _bind_failure(end.__context__, settings))
            return 1
    served = state.models.served
    answered = bool(served) and all(model.engine.failure is None for model in served)
    return 0 if answered and server.started else 1


def _is_no_bind_error(record: logging.LogRecord) -> bool:
    """A log filter that drops uvicorn's bind errors, because `serve` reports them itself."""
    return not isinstance(record.msg, OSError)


def _bind_failure(error: BaseException | None, settings: ServeSettings) -> str:
    match getattr(error, "errno", None):
        case errno.EADDRINUSE:
            return (
                f"port {settings.port} is in use: end the process that listens there, or choose "
                "another port; --port 0 picks a free one"
            )
        case errno.EADDRNOTAVAIL | socket.EAI_NONAME:
            return (
                f"--host {settings.host} is not an address of this machine: use 127.0.0.1 to be "
                "reachable from this machine only, or 0.0.0.0 from everywhere"
            )
        case _:
            return f"cannot listen on --host {settings.host}, --port {settings.port}: {error}"
