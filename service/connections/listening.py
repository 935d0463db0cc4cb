"""Listening: whether a client that says no more still waits for its reply.

A client that closes and one that only ends its own side (`shutdown(SHUT_WR)`, `nc -N`) send the
same segment. What tells them apart is what comes back for something sent: a reset from the first,
an acknowledgement from the second. Before a reply has begun that something is an interim response,
`100 Continue`, which every client of HTTP/1.1 has to skip (RFC 9110, 15.2) and which means nothing;
once it has begun, it is the reply. So a slot of a client that left is free after one round trip,
and one that later leaves without another word is asked again with every look of the register.

Not here: what follows from it (`protocol.py`). Where the kernel does not tell what came back
(`tcp.py`), the next thing sent fails.
"""

import asyncio

from logitd.service.connections.tcp import RESET, tcp_info

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK_SECONDS = 0.01
"""After asking, the answer is looked for after so long, and then after twice as long each time."""
LAST_LOOK_SECONDS = 0.64
UNANSWERED_SECONDS = 5.0
"""A client from which nothing comes back, behind a firewall that drops resets, is gone by then."""


class Listening:
    """One client that says no more. `ask` may be called again and again."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._look: asyncio.TimerHandle | None = None
        self._mark = (0.0, -1)  # when something was acknowledged last, and bytes by then

    def ask(self, *, interim: bool) -> None:
        """End the connection when it turns out that nobody listens. `interim`: the reply has not
        begun, so something has to be sent for it."""
        if self._gone():
            self._transport.abort()
        elif interim:
            self._transport.write(INTERIM)
            if self._look is None:
                self._look_in(FIRST_LOOK_SECONDS)

    def end(self) -> None:
        """The connection has ended."""
        if self._look is not None:
            self._look.cancel()

    def _look_in(self, seconds: float) -> None:
        self._look = self._loop.call_later(seconds, self._look_again, seconds)

    def _look_again(self, waited: float) -> None:
        self._look = None
        if self._gone():
            self._transport.abort()
        elif waited < LAST_LOOK_SECONDS:
            self._look_in(2 * waited)

    def _gone(self) -> bool:
        """Whether a reset came back, or for too long nothing, though something is on its way. A
        process that was itself stopped for a while proves nothing: its kernel went on."""
        info = tcp_info(self._transport)
        if info is None:
            return False
        now = self._loop.time()
        if info.acknowledged > self._mark[1] or not info.in_flight:
            self._mark = now, info.acknowledged
        return info.state == RESET or now - self._mark[0] > UNANSWERED_SECONDS
