"""MaskWorker: masks of constraints, computed in a thread while the model computes.

A mask is needed when a step samples, and can be computed as soon as the token before is known. In
between lies the whole forward, which leaves the interpreter free:

    engine's thread   begin(matchers) | forward ............ | wait | allowed(): cached | sample
    worker's thread                   | allowed() of each ... |

Does not know what a constraint is, and changes no mask: without it, `allowed` computes the same on
the thread that asks.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from logitd.model.inference.constraints.protocol import TokenMatcher

ENOUGH = 16
"""From so many matchers on the thread is used. It takes a core from the forward for that time: with
8 sequences of a small model on as many compute threads as processors, steps took up to a third
longer than with masks before sampling, with 32 the same. On an idle processor it is a gain."""


class MaskWorker:
    """The thread. One caller at a time, which leaves the matchers alone until it has waited."""

    def __init__(self) -> None:
        self._requested: queue.SimpleQueue[Sequence[TokenMatcher] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="logitd-masks", daemon=True)
        self._thread.start()

    def begin(self, matchers: Sequence[TokenMatcher]) -> Callable[[], None]:
        """Have the mask of each computed; the returned function waits until all are."""
        if len(matchers) < ENOUGH:
            return _do_nothing
        self._requested.put(matchers)
        return self._done.get

    def close(self) -> None:
        """End the thread after the batch that it is at."""
        self._requested.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (matchers := self._requested.get()) is not None:
            for matcher in matchers:
                # An error here is raised again by the sampling thread, which reports it.
                with suppress(Exception):
                    matcher.allowed()
            self._done.put(None)


def _do_nothing() -> None:
    """Wait for nothing, as nothing was begun."""
