"""Turns: what one can use at a time, and several callers wait for.

Callers take turns, so that nobody waits behind all that somebody else has asked for; within a
caller, first come, first served. Belongs to the event loop.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Like asyncio.Lock, with a line for each caller."""

    def __init__(self) -> None:
        self._taken = False
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, caller: str, timeout: float | None = None) -> AsyncIterator[None]:
        """A turn. Raises TimeoutError where it has not come within `timeout` seconds."""
        async with asyncio.timeout(timeout):
            await self._wait(caller)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str) -> None:
        if not self._taken:
            self._taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(caller, deque())
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just come
                self._pass_on()
            elif turn in line:
                line.remove(turn)
                self._forget_empty(caller)
            raise

    def _pass_on(self) -> None:
        """The turn is over: it is the next caller's, whose place is then the last."""
        while self._lines:
            caller, line = next(iter(self._lines.items()))
            turn = line.popleft()
            self._lines.move_to_end(caller)
            self._forget_empty(caller)
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False

    def _forget_empty(self, caller: str) -> None:
        if caller in self._lines and not self._lines[caller]:
            del self._lines[caller]
