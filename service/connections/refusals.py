"""Refusals: the errors that a connection answers itself, without the application."""

from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from logitd.service.connections.limits import MAX_HEADER_BYTES, MIN_BYTES_PER_SECOND
from logitd.service.errors import ApiError, unavailable


def headers_too_large() -> ApiError:
    """Request line and headers have more bytes than they may."""
    message = f"the address and the headers are larger than {MAX_HEADER_BYTES} bytes together"
    return ApiError(431, "invalid_request_error", message)


def not_http(error: Exception) -> ApiError:
    """The parser does not understand the request."""
    return ApiError(400, "invalid_request_error", f"this is not an HTTP/1.1 request: {error}")


def too_slow(what: str, slow_sender_timeout: float) -> ApiError:
    """Headers or a body did not come in time."""
    return ApiError(
        408,
        "timeout_error",
        f"{what} did not come in time: the headers may take {slow_sender_timeout:g} s, and the "
        f"body has to come with {MIN_BYTES_PER_SECOND} bytes/s; send faster, or raise "
        "--slow-sender-timeout",
    )


def whole_reply(error: ApiError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A reply as bytes, for a client that has not sent a whole request."""
    body = orjson.dumps(error.body())
    lines = [
        STATUS_LINE[error.status].removesuffix(b"\r\n"),
        *(name + b": " + value for name, value in headers),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    if error.retry_after is not None:
        lines.append(b"retry-after: %d" % error.retry_after)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def too_many_connections(scope: Any, receive: Any, send: Any) -> None:
    """The application that answers when there are too many connections."""
    error = unavailable("there are too many connections; close those that are not needed")
    response = error.response()
    response.headers["Connection"] = "close"
    await response(scope, receive, send)
