"""Attributions: choose the attribution that computes the next piece.

Attributions need no slot of the cache. They wait in a separate queue, under the rules of the main
queue. Up to AT_ONCE attributions run at a time and take turns, one piece each, so that a long one
does not delay a short one. A step computes at most one piece, after everything else. Then the
engine only decodes for a while (`scheduler.py`).
"""

from collections import deque

from logitd.model.inference.engine.queue import WaitingQueue
from logitd.model.inference.engine.sequence import Sequence, State

AT_ONCE = 2
"""Number of attributions that run at a time. It is small because each keeps the residual stream
before each block in memory."""


class AttributionTurns:
    """The waiting attributions, and the running ones, which take turns."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.running: deque[Sequence] = deque()  # in the order of their turns

    def has_work(self) -> bool:
        """True if `next` would return a sequence."""
        return bool(self.running) or any(self.waiting.firsts())

    def next(self, now: float) -> Sequence | None:
        """Begin waiting attributions, up to AT_ONCE running. Returns the one that computes the next
        piece."""
        while len(self.running) < AT_ONCE:
            first = next(self.waiting.firsts(), None)
            if first is None:
                break
            self.waiting.take(first)
            first.state = State.ATTRIBUTION
            first.admitted = now
            self.running.append(first)
        if not self.running:
            return None
        self.running.rotate(-1)
        return self.running[-1]

    def remove(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
