"""Held: what a request holds while it is answered, such as its place under a limit.

It is released before the last bytes of the reply are sent. A client that has read them may send its
next request immediately, before the tasks of the previous one have ended.
"""

from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HELD = "logitd.held"
"""ASGI scope key for the stack of a request."""


class ReleaseHeld:
    """ASGI middleware that closes the stack of each request: before the last message of its reply,
    or when the request ends without one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as stack:
            scope[HELD] = stack

            async def send_released(message: Message) -> None:
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    stack.close()
                await send(message)

            await self._app(scope, receive, send_released)


def held(scope: Scope) -> ExitStack:
    """The stack that is closed at the end of a request."""
    stack: ExitStack = scope[HELD]
    return stack
