"""Refusals: error replies that a connection sends itself, without the application."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from logitd.service.body_writer import MIN_BYTES_PER_SECOND
from logitd.service.connections.reading import MAX_HEADER_BYTES
from logitd.service.errors import ApiError, unavailable


def head_size(target: int, headers: list[tuple[bytes, bytes]]) -> int:
    """Size in bytes of a request's target and headers, without optional white space. `target` is
    the size of the target."""
    return target + sum(len(name) + len(value) + 4 for name, value in headers)


def headers_too_large() -> ApiError:
    message = f"the address and the headers are larger than {MAX_HEADER_BYTES} bytes together"
    return ApiError(431, "invalid_request_error", message)


def not_a_path(target: bytes) -> str:
    """The message for a request whose target has no path, such as the target of CONNECT."""
    return (
        f"the target of the request is {target[:100].decode('latin-1')!r}, but must be a path, "
        "such as /health; this server is not a proxy"
    )


def too_slow(part: str, slow_sender_timeout: float) -> ApiError:
    """The error for a request whose `part`, the headers or the body, did not arrive in time."""
    return ApiError(
        408,
        "timeout_error",
        f"{part} did not arrive in time: the headers may take {slow_sender_timeout:g} s, and the "
        f"body must arrive at {MIN_BYTES_PER_SECOND} bytes/s; send faster, or raise "
        "--slow-sender-timeout",
    )


def whole_reply(error: ApiError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The bytes of an error reply to an incomplete request."""
    response = error.response()
    lines = [*headers, *response.raw_headers, (b"connection", b"close")]
    head = STATUS_LINE[error.status] + b"".join(b"%s: %s\r\n" % line for line in lines)
    return head + b"\r\n" + bytes(response.body)


async def too_many_connections(scope: Any, receive: Any, send: Any) -> None:
    """ASGI application that refuses requests while there are too many connections."""
    error = unavailable("there are too many connections; close those that are not needed")
    response = error.response()
    response.headers["Connection"] = "close"
    await response(scope, receive, send)
