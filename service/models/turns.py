"""Turns: a lock, or a few places, that waiting callers hold in turn. So the many requests of one
caller delay another caller by one.

Each caller's own requests are served in order. Use it only on the event loop.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CallerTurns:
    """A number of places with a queue for each caller. One place makes it a lock."""

    def __init__(self, places: int = 1) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Hold a place in this context, after waiting for a turn."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(caller, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # its turn had just come
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    @property
    def is_full(self) -> bool:
        return not self._free

    def _pass_on(self) -> None:
        """Give the place to the next caller, whose other requests then wait behind all callers."""
        while self._waiting:
            caller, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
