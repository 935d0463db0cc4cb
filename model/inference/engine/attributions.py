"""Attributions: which attribution computes its next piece.

They need no slot of the cache, so they wait in a queue of their own, by the rules of all:
by priority, callers in turn, each caller's in the order of arrival. AT_ONCE of them are begun, and
these take turns, a piece each, so that a long one does not keep a short one waiting; what they keep
between pieces is what bounds their number. A step computes one piece at most, after everything
else, and then others decode alone for a while (`scheduler.py`). Knows
sequences, not tensors.
"""

from collections import deque

from logitd.model.inference.engine.queue import WaitingQueue
from logitd.model.inference.engine.sequence import Sequence, State

AT_ONCE = 2
"""Attributions that are begun and not ended. Each keeps a residual stream before each block."""


class AttributionTurns:
    """The attributions that wait, and those that take turns."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.running: deque[Sequence] = deque()  # the next one first

    def enqueue(self, sequence: Sequence, *, held: bool) -> None:
        self.waiting.push(sequence, held=held)

    def has_work(self) -> bool:
        """Whether `next` would give one."""
        return bool(self.running) or any(self.waiting.firsts())

    def next(self, now: float) -> Sequence | None:
        """Begin what there is room for; whose piece is next."""
        while len(self.running) < AT_ONCE:
            first = next(iter(self.waiting.firsts()), None)
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
        """One has ended, or waits no longer."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)

    def check_integrity(self) -> None:
        """For tests."""
        assert len(self.running) <= AT_ONCE
        assert all(s.state is State.ATTRIBUTION and s.slot is None for s in self.running)
        assert all(s.state is State.WAITING and s.slot is None for s in self.waiting)
