"""Attributions: chooses the attribution that computes its next piece.

Attributions need no slot of the cache. They wait in a queue of their own, under the same rules.
AT_ONCE of them are begun and take turns, a piece each, so that a long one does not delay a short
one; their memory bounds their number. A step computes one piece at most, after everything else, and
then others decode alone for a while (`scheduler.py`). Knows sequences, not tensors.
"""

from collections import deque

from logitd.model.inference.engine.queue import WaitingQueue
from logitd.model.inference.engine.sequence import Sequence, State

AT_ONCE = 2
"""Attributions that are begun at once. Each keeps a residual stream before each block."""


class AttributionTurns:
    """The attributions that wait, and those that take turns."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.running: deque[Sequence] = deque()  # the next one first

    def has_work(self) -> bool:
        """True if `next` would return a sequence."""
        return bool(self.running) or any(self.waiting.firsts())

    def next(self, now: float) -> Sequence | None:
        """Begin attributions up to AT_ONCE; returns the one that computes a piece."""
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
