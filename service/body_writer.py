"""BodyWriter: an ASGI extension that writes pieces of a chunked body past the middleware.

A piece passes through a coroutine of each middleware with ASGI's `send`, and a task has to wake for
it. With this extension a callback can write it. `connections/` has it; other servers, such as
Ray's, need not.
"""

from collections.abc import Callable

from starlette.types import Scope

EXTENSION = "logitd.body_writer"
"""Name of the ASGI extension, whose member `write` is the request's `BodyWriter`."""

BodyWriter = Callable[[bytes], bool]
"""Writes a piece of a reply that has begun. Returns False if the client reads slowly or has gone:
then `send` has to send the next piece, because it waits for the client."""


def body_writer(scope: Scope) -> BodyWriter | None:
    """The writer of a request's reply; None if the server has none."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(EXTENSION, {}).get("write")
    return writer
