"""Middleware: what happens to every request, whatever its endpoint. Pure ASGI.

From the outside in: `RequestLog` (a request id, taken from `X-Request-ID` or made, and returned;
the count by endpoint and status; its trace; one log line; a cap on the size of headers), CORS where
it is asked for, `BugAnswer` (the answer to what should not have happened; inside CORS, so that a
browser can read it), the Host (`service/access/hosts.py`), the API keys (`auth.py` there), and
HEAD, which becomes GET. Starlette's BaseHTTPMiddleware would hide a client's disconnect and make
streams several times dearer.
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
from logitd.service.connections.limits import MAX_HEADER_BYTES, head_size
from logitd.service.connections.refusals import headers_too_large
from logitd.service.engine.admission import Limit
from logitd.service.errors import LIMIT, internal_error
from logitd.service.http.envelope import CHECKPOINT_HEADERS
from logitd.service.log import FIELDS
from logitd.service.metrics.metrics import Metrics, endpoint_label
from logitd.service.models.context import CONTEXT, MODEL, RequestContext
from logitd.service.tracing.attributes import Ended

logger = logging.getLogger("logitd.http")

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID_SCOPE = "logitd.request_id"
"""Where a request's scope holds its id."""
MAX_USER = 64
"""Characters of `user` that are logged."""
QUIET = ("/health", "/info", "/metrics")
"""Endpoints that are polled: logged at debug level, unless the key is wrong."""
EXPOSED_HEADERS = ("X-Request-ID", "Retry-After", "Server-Timing", *CHECKPOINT_HEADERS)
"""What a page of another origin may read of a reply, besides what it always may."""


class RequestLog:
    """Names, counts, traces and logs each request. Of what it says, only the `user` of an OpenAI
    request is logged."""

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
            self._count(Ended(scope, status, seconds, exception, whole))

    def _count(self, ended: Ended) -> None:
        """Count a request that has ended, make its trace, and write its line."""
        scope, status, seconds = ended.scope, ended.status, ended.seconds
        trace = None if self._trace is None else self._trace(ended)
        endpoint, caller = endpoint_label(scope["path"]), scope.get(CALLER)
        limit: Limit | None = scope["state"].get(LIMIT)
        self._metrics.observe_request(endpoint, status or 500, seconds, caller, limit)
        quiet = endpoint in QUIET and status != 401
        level = logging.DEBUG if quiet else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "endpoint": endpoint,
            "status": status,
            "duration_ms": round(1e3 * seconds, 1),
            "request_id": scope[REQUEST_ID_SCOPE],
        }
        if trace is not None:
            fields["trace_id"] = trace
        if caller is not None:
            fields["key"] = caller
        if limit is not None:
            fields["limit"] = limit.value
        if (model := scope["state"].get(MODEL)) is not None:
            fields["model"] = model
        fields |= _computed(scope) | _user(scope)
        logger.log(level, _line(fields), extra={FIELDS: fields})


class HeadAsGet:
    """Answers HEAD as GET; the server that writes the reply leaves its body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class BugAnswer:
    """Answers an exception with 500: the traceback to the log, the request's id to the client."""

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
            if begun:  # too late for another answer: the connection is closed
                raise
            request_id: str = scope[REQUEST_ID_SCOPE]
            logger.exception("our own bug, request %s", request_id)
            await internal_error(request_id).response()(scope, receive, send)


def _computed(scope: Scope) -> dict[str, Any]:
    """What the engine did for a request, if it did anything: tokens, and where the time went."""
    context: RequestContext | None = scope["state"].get(CONTEXT)
    if context is None or not (usage := context.session.usage).sequences:
        return {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        **{f"{phase}_ms": round(took, 1) for phase, took in usage.milliseconds().items()},
    }


def _user(scope: Scope) -> dict[str, Any]:
    """Nothing that could begin another line or paint a terminal; last, so that it can pass for
    nothing else."""
    user: str = scope["state"].get("user", "")
    printable = "".join(c if c.isprintable() else "?" for c in user)
    return {"user": clip(printable, MAX_USER)} if user else {}


def _line(fields: Mapping[str, Any]) -> str:
    """A request in text: `POST /generate 200 12.3 ms ID prompt_tokens=3 ...`."""
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
