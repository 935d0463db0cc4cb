"""ASGI middleware for every request.

From the outermost to the innermost: `RequestLog` (request id, metrics, trace, log line, size limit
of the headers), CORS if enabled, `BugAnswer` (the reply to an unexpected exception; inside CORS, so
that a browser can read it), `HostCheck` (`service/access/hosts.py`), `ReleaseHeld`
(`service/access/held.py`), `ApiKeyCheck` (`service/access/auth.py`) and `HeadAsGet`. None uses
Starlette's BaseHTTPMiddleware, which would hide disconnects and make streams several times slower.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logitd.model.operations.prompts import clip
from logitd.service.access.auth import CALLER
from logitd.service.connections.reading import MAX_HEADER_BYTES
from logitd.service.connections.refusals import head_size, headers_too_large
from logitd.service.errors import LIMIT, internal_error
from logitd.service.http.envelope import CHECKPOINT_HEADERS
from logitd.service.log import FIELDS
from logitd.service.metrics.metrics import Metrics, endpoint_label
from logitd.service.models.context import MODEL
from logitd.service.tracing.attributes import Ended

logger = logging.getLogger("logitd.http")

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID_SCOPE = "logitd.request_id"
"""ASGI scope key for the request's id."""
MAX_USER = 64
"""Maximum number of characters of `user` in the log."""
QUIET = re.compile(r"/(health(/.*)?|info|metrics|(static|docs/assets)/.*)", re.DOTALL)
"""Paths that clients poll, and the files of pages. Their requests are logged at debug level, unless
the key is wrong."""
EXPOSED_HEADERS = ("X-Request-ID", "Retry-After", "Server-Timing", *CHECKPOINT_HEADERS)
"""Reply headers that a page of another origin may read, in addition to the standard ones."""


class RequestLog:
    """Gives each request an id (the one in `X-Request-ID`, or a new one), and counts, traces and
    logs it. OpenAI's field `user` is the only part of a request's body that is logged."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        trace: Callable[[Ended], str | None] | None = None,
    ) -> None:
        """`trace` makes the spans of a request and returns the id of its trace, if it has one."""
        self._app = app
        self._metrics = metrics
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope["headers"])
        scope[REQUEST_ID_SCOPE] = request_id.decode()
        started = time.perf_counter()
        status, whole = 0, False
        exception: str | None = None

        async def send_named(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            elif not message.get("more_body"):
                whole = True
            await send(message)

        scope.setdefault("state", {})
        try:
            target = len(scope["raw_path"]) + len(scope["query_string"])
            if head_size(target, scope["headers"]) > MAX_HEADER_BYTES:
                await headers_too_large().response()(scope, receive, send_named)
            else:
                await self._app(scope, receive, send_named)
        except Exception as error:
            exception = type(error).__name__
            raise
        finally:
            seconds = time.perf_counter() - started
            self._record(Ended(scope, status, seconds, exception, whole))

    def _record(self, ended: Ended) -> None:
        """Count, trace and log a request that has ended."""
        scope, status, state = ended.scope, ended.status, ended.scope["state"]
        trace = None if self._trace is None else self._trace(ended)
        endpoint, caller = endpoint_label(scope["path"]), scope.get(CALLER)
        self._metrics.observe_request(
            endpoint, status or 500, ended.seconds, caller, state.get(LIMIT)
        )
        quiet = QUIET.fullmatch(scope["path"]) and status != 401
        level = logging.DEBUG if quiet else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "endpoint": endpoint,
            "status": status,
            "duration_ms": round(1e3 * ended.seconds, 1),
            "request_id": scope[REQUEST_ID_SCOPE],
            "trace_id": trace,
            "key": caller,
            "limit": state.get(LIMIT),
            "model": state.get(MODEL),
            **_work(ended),
            "user": _printable(state.get("user")),
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, _line(fields), extra={FIELDS: fields})


class HeadAsGet:
    """Answers HEAD like GET. The server omits the body of the reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class BugAnswer:
    """Answers an unexpected exception with 500. The traceback goes to the log; the client gets only
    the request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            if begun:  # too late for an error reply; the server closes the connection
                raise
            request_id: str = scope[REQUEST_ID_SCOPE]
            logger.exception("internal error, request %s", request_id)
            await internal_error(request_id).response()(scope, receive, send)


def _work(ended: Ended) -> dict[str, Any]:
    """The token counts and times of the engine's work for a request, and the engine's id of the
    first request that failed; empty if there was no work."""
    usage = ended.usage
    if usage is None or not usage.sequences:
        return {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        **{f"{phase}_ms": round(took, 1) for phase, took in usage.milliseconds().items()},
        "failed": usage.failed and usage.failed.request_id,
    }


def _printable(user: str | None) -> str | None:
    """`user`, with "?" for characters that could start a new line or control a terminal."""
    return user and clip("".join(c if c.isprintable() else "?" for c in user), MAX_USER)


def _line(fields: Mapping[str, Any]) -> str:
    """The log line of a request: `POST /generate 200 12.3 ms ID prompt_tokens=3 ...`. The client's
    `user` comes last, so that its text cannot pass for another field."""
    method, endpoint, status, duration, request_id, *rest = fields.items()
    return " ".join(
        [
            f"{method[1]} {endpoint[1]} {status[1]} {duration[1]} ms {request_id[1]}",
            *(f"{name}={value}" for name, value in rest),
        ]
    )


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()
