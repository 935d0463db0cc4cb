"""logitd on Ray Serve: the application of `logitd serve` in as many replicas as the load needs.

    python -m deploy.ray_serve [CHECKPOINT] [--ray local] [--min-replicas 1] [--max-replicas 2] ...

The command accepts the flags and LOGITD_* variables of `logitd serve`, except those for
connections, which Ray handles. `RaySettings` adds the flags for replicas. The command serves until
SIGTERM or Ctrl-C. Ray's own tools can use `app` as the entry point: `serve run deploy.ray_serve:app
checkpoint=... slots=8`, or `serve deploy` with a configuration file that sets the same names in
`args`.

A replica counts as started once its weights are loaded. Ray replaces it if its engine fails or
stalls. HAProxy, which Ray starts, passes connections straight to the replicas. Requests with the
same header `X-Session-Id` go to the same replica, which has their prefix in its cache. Requests
without this header go to the replicas in turn. HAProxy does not read bodies, so it cannot route by
prefix. Ray is an optional dependency (the extra `ray`). This module does not roll out new versions
of logitd. In a cluster of several machines, logitd and the checkpoint must be at the same path on
every machine.
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from tempfile import gettempdir
from typing import Any

import click
from pydantic import Field, ValidationInfo, field_validator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logitd.model.device import available_processors
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.ray_cluster import LOCAL, connected
from logitd.model.extras import installation
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.openmp import spin_variables
from logitd.service.application.app import create_app
from logitd.service.cli.commands.servable import NotServable, checkpoint_at
from logitd.service.cli.settings_command import SettingsCommand
from logitd.service.log import configure_logging
from logitd.service.models.state import ServiceState
from logitd.service.settings.serve import ServeSettings

HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # instead of 30
    # Ray writes this after `balance`. If a replica disappears, only its sessions move.
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)\n    hash-type consistent",
    **{
        f"RAY_SERVE_HAPROXY_{name}": f"{gettempdir()}/logitd-haproxy-{os.getpid()}/{file}"
        for name, file in [
            ("CONFIG_FILE_LOC", "haproxy.cfg"),
            ("SOCKET_PATH", "admin.sock"),
            ("SERVER_STATE_BASE", ""),
            ("SERVER_STATE_FILE", "server-state"),
        ]
    },
}
"""Environment variables that make Ray serve through HAProxy. An existing cluster must have been
started with the first five, because its own processes read them. Variables that are already set in
the environment keep their values."""
os.environ |= {**HAPROXY, **os.environ}  # Ray reads them when it is imported

try:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, HTTPOptions
except ImportError as error:
    raise SystemExit(f"Ray Serve is not installed: {installation('ray')}") from error

NAME = "logitd"
OF_CONNECTIONS = "HAProxy manages the clients' connections: leave it out"
REFUSED = {
    "import_model": "replicas do not import models: run `logitd import` first",
    "max_connections": OF_CONNECTIONS,
    "slow_sender_timeout": OF_CONNECTIONS,
    "slow_reader_timeout": OF_CONNECTIONS,
    "drain_grace": OF_CONNECTIONS,
}
"""Settings of `logitd serve` that would have no effect here, each with the reason."""
HEALTH_SECONDS = 2.0
"""Seconds between two health checks of a replica."""


class RaySettings(ServeSettings):
    """Serve a checkpoint over HTTP, in replicas on a Ray cluster."""

    ray: str = Field(
        LOCAL,
        description="address of a Ray cluster (host:port), auto for the one that this machine "
        "belongs to, or local, which starts Ray here and stops it at the end",
    )
    min_replicas: int = Field(1, ge=1, le=1000, description="minimum number of replicas")
    max_replicas: int = Field(1, ge=1, le=1000, description="maximum number of replicas")
    requests_per_replica: float | None = Field(
        None,
        gt=0,
        description="running requests per replica above which replicas are added "
        "(default: the number of its slots)",
    )
    gpus: float = Field(0, ge=0, description="number of GPUs per replica")

    @field_validator("max_replicas")
    @classmethod
    def _at_least_min_replicas(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("min_replicas", 1)
        if value < least:
            raise ValueError(f"must be at least --min-replicas, which is {least}")
        return value

    @field_validator(*REFUSED)
    @classmethod
    def _has_an_effect(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if value != ServeSettings.model_fields[info.field_name].default:
            raise ValueError(REFUSED[info.field_name])
        return value

    @field_validator("port")
    @classmethod
    def _is_a_fixed_port(cls, value: int) -> int:
        if value == 0:
            raise ValueError("Ray's proxies need a fixed port: choose a port number other than 0")
        return value


COMMAND = SettingsCommand(
    "deploy.ray_serve", RaySettings, "Serve a checkpoint over HTTP, in replicas on a Ray cluster."
)


class Replica:
    """The application in one of Ray's processes. The replica counts as started once its weights are
    loaded."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` has a value for every field, so this process's environment variables have no
        effect."""
        self._settings = ServeSettings(_env_file=None, **settings)
        configure_logging(self._settings.log_level, json=self._settings.log_format == "json")
        self._app = create_app(self._settings)
        self._state: ServiceState = self._app.state.service

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _StartedWhenLoaded(self._app, self._state)

    def check_health(self) -> None:
        """Raise RuntimeError if no request can be answered, so that Ray starts another replica."""
        status, reason = self._state.status()
        if status in ("failed", "stalled"):
            raise RuntimeError(f"{status}: {reason}")


class _StartedWhenLoaded:
    """Delays the end of the application's startup until loading has succeeded or failed. Ray's next
    health check reports a failure. (Without Ray, the server listens while it loads the
    weights.)"""

    def __init__(self, app: ASGIApp, state: ServiceState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._state.settled.wait()
            elif message["type"] == "http.response.start":  # Ray adds its own request id
                message["headers"] = [
                    (name, value)
                    for name, value in message["headers"]
                    if name.lower() != b"x-request-id"
                ]
            await send(message)

        await self._app(scope, receive, send_on)


def application(settings: RaySettings) -> serve.Application:
    """The deployment for these settings. Each replica computes with `settings.threads` threads and
    reserves the same number of processors. If `threads` is 0, this machine's processors are divided
    among the replicas."""
    threads = settings.threads or max(1, available_processors() // settings.max_replicas)
    ours = {name: getattr(settings, name) for name in ServeSettings.model_fields}
    sources = tuple(replace(one, path=one.path.resolve()) for one in settings.checkpoint)
    ours |= {"threads": threads, "checkpoint": sources}
    if settings.slots is None and settings.kv_cache_memory is None:
        ours["slots"] = EngineConfig().slots  # not a share: replicas share the memory
    slots = (settings.slots or EngineConfig().slots) * len(sources)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            initial_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.requests_per_replica or slots,
        ),
        # Further requests wait at the proxy; logitd's own 429 limits sequences and tokens.
        max_ongoing_requests=slots + settings.max_queue,
        ray_actor_options={
            "num_cpus": threads,
            "num_gpus": settings.gpus,
            "runtime_env": {"env_vars": spin_variables(os.environ)},
        },
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_timeout + 5,
        graceful_shutdown_wait_loop_s=0.5,
    )
    bound: serve.Application = deployment.bind(ours)
    return bound


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """The application for `serve run` and `serve deploy`. `arguments` maps names of settings to
    values."""
    return application(RaySettings(**arguments))


def main(arguments: list[str]) -> int:
    """Serve until a signal arrives. Returns the exit code, which is 2 if the command line is
    invalid."""
    try:
        settings = COMMAND.main(arguments, standalone_mode=False)
        if not isinstance(settings, RaySettings):
            return 0  # --help was shown
        for source in settings.models:
            checkpoint_at(source.path, settings.follow)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except NotServable as error:
        _say(str(error))
        return 2
    ended = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)
    try:
        with connected(settings.ray, _say):
            _start(settings)
            try:
                _say(f"ready at http://{settings.host}:{settings.port}")
                signal.sigwait(ended)
                _say("stopping")
            finally:
                serve.shutdown()
    except (ExtractionError, RuntimeError) as error:
        _say(str(error))
        return 1
    return 0


def _start(settings: RaySettings) -> None:
    """Start the replicas, and return when the first ones answer. Raises RuntimeError if no replica
    can be started."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(
        proxy_location="HeadOnly" if settings.ray == LOCAL else "EveryNode",
        http_options=HTTPOptions(
            host=settings.host,
            port=settings.port,
            keep_alive_timeout_s=max(1, round(settings.keep_alive_timeout)),
        ),
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    try:
        serve.run(application(settings), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise RuntimeError(f"no replica could be started: {_reason() or error}") from error


def _reason() -> str:
    """The reason why no replica could be started: the last line of a deployment's message that
    reports an error. Returns "" if there is no such line."""
    for deployment in serve.status().applications[NAME].deployments.values():
        lines = [line for line in deployment.message.splitlines() if "Error: " in line]
        if lines:
            return lines[-1].strip()
    return ""


def _say(line: str) -> None:
    print(f"deploy.ray_serve: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
