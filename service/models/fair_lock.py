"""FairLock: a lock whose callers take turns, so that none waits behind all that another asked for.

Within a caller, first come, first served. Belongs to the event loop.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary


class FairLock:
    """Like asyncio.Lock, which is first come, first served, but with at most one waiter of each
    caller in its queue: the others wait for a lock of their caller."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def held_by(self, caller: str, timeout: float | None = None) -> AsyncIterator[None]:
        """Hold the lock. Raises TimeoutError if it is not free within `timeout` seconds."""
        own = self._own.setdefault(caller, asyncio.Lock())
        async with AsyncExitStack() as held:
            async with asyncio.timeout(timeout):
                await held.enter_async_context(own)
                await held.enter_async_context(self._lock)
            yield
