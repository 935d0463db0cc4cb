"""BodyWriter: an ASGI extension that writes pieces of a chunked body, bypassing the middleware.

With ASGI's `send`, a task has to wake for each piece, and the piece passes through a coroutine of
each middleware. With this extension, a callback can write the piece. The server in `connections/`
has the extension; other servers, such as Ray's, need not have it.
"""

from collections.abc import Callable

from starlette.types import Scope

EXTENSION = "logitd.body_writer"
"""Name of the ASGI extension, whose member `write` is the request's `BodyWriter`."""

MIN_BYTES_PER_SECOND = 2048
"""Minimum rate at which a client must send and read: half of the 32 kbit/s to which mobile networks
throttle a connection. So 4 MiB may take 34 minutes."""

BodyWriter = Callable[[bytes], bool]
"""Writes a piece of a reply that has begun. Returns False if the client reads slowly or has
disconnected. The caller must then send the next piece with `send`, which waits for the client."""


def body_writer(scope: Scope) -> BodyWriter | None:
    """The writer of a request's reply; None if the server lacks the extension."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(EXTENSION, {}).get("write")
    return writer
