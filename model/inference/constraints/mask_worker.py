"""Look-ahead: masks of constraints, computed in a thread beside the model's forward.

A mask is needed only when a step samples, and known to be needed as soon as the token before it is
taken in. In between lies the whole forward, in which the interpreter is free: `MaskWorker` has a
thread that computes masks then. Does not know what a constraint is, and changes no mask: without
it, `allowed` computes the same on the thread that asks.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from model.inference.constraints.protocol import TokenMatcher

ENOUGH = 16
"""Matchers from which on the thread is asked. It takes a core from the forward for that time: with
8 sequences of a small model on as many compute threads as processors, steps took up to a third
longer than with masks before sampling, with 32 the same. On an idle processor it is a gain."""


class MaskWorker:
    """A thread that looks for others. One caller at a time; matchers that are being looked at are
    not touched until the wait is over."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Sequence[TokenMatcher] | None] = queue.SimpleQueue()
        self._looked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="logitd-masks", daemon=True)
        self._thread.start()

    def begin(self, matchers: Sequence[TokenMatcher]) -> Callable[[], None]:
        """Have what may follow computed for each; what is returned waits until it is."""
        if len(matchers) < ENOUGH:
            return _nothing
        self._asked.put(matchers)
        return self._looked.get

    def close(self) -> None:
        """End the thread, when what it has begun is done."""
        self._asked.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (matchers := self._asked.get()) is not None:
            for matcher in matchers:
                # What fails here fails again where it is asked for, and is told there.
                with suppress(Exception):
                    matcher.allowed()
            self._looked.put(None)


def _nothing() -> None:
    """Nothing was begun, so there is nothing to wait for."""
