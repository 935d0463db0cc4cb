"""Middleware: what happens to every request, whatever its endpoint. Pure ASGI.

A request id (taken from `X-Request-ID` or made, and returned), the count by endpoint and status,
one log line, a cap on the size of headers, which the HTTP parser does not have, and the answer to
what should not have happened. Starlette's BaseHTTPMiddleware would hide a client's disconnect and
make streams several times dearer.
"""

import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ApiError, clip, internal_error
from service.metrics import Metrics, endpoint_label

logger = logging.getLogger("logitd.http")

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
MAX_HEADER_BYTES = 64 * 1024
MAX_USER = 64
"""Characters of `user` that are logged."""
QUIET = ("/health", "/metrics")
"""Endpoints that are polled: logged at debug level."""


class RequestLog:
    """Names, counts and logs each request. Of what it says, only the `user` of an OpenAI request is
    logged."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope["headers"])
        started = time.perf_counter()
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
                too_large = ApiError(
                    431,
                    "invalid_request_error",
                    f"the headers are larger than {MAX_HEADER_BYTES} bytes together",
                )
                await too_large.response()(scope, receive, send_named)
            else:
                await self._app(scope, receive, send_named)
        except Exception:
            if status:  # too late for another answer: the connection is closed
                raise
            logger.exception("our own bug, request %s", request_id.decode())
            await internal_error(request_id.decode()).response()(scope, receive, send_named)
        finally:
            endpoint = endpoint_label(scope["path"])
            self._metrics.requests.labels(endpoint, str(status or 500)).inc()
            logger.log(
                logging.DEBUG if endpoint in QUIET else logging.INFO,
                "%s %s %d %.1f ms %s%s",
                scope["method"],
                endpoint,
                status,
                1e3 * (time.perf_counter() - started),
                request_id.decode(),
                _logged_user(scope),
            )


def note_user(request: Request, user: str | None) -> None:
    """Let the request's line in the log say on whose behalf it came."""
    if user:
        request.state.user = user


def _logged_user(scope: Scope) -> str:
    """Nothing that could begin another line or paint a terminal; last, so that it can pass for
    nothing else."""
    user: str = scope.get("state", {}).get("user", "")
    printable = "".join(c if c.isprintable() else "?" for c in user)
    return f" user={clip(printable, MAX_USER)}" if user else ""


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()
