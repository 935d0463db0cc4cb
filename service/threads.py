"""Threads: runs work in a thread and keeps waiting for it after a cancellation."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def to_thread_until_done(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread. A thread cannot be interrupted, so a cancelled call still ends only
    after its thread. A lock around this call therefore limits the number of threads, even if
    clients leave."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # retrieve it, or asyncio warns
        raise
