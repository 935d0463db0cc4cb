"""Attributions: chooses the attribution whose next piece a step computes.

Attributions need no slot of the cache. They wait in a separate queue with the same rules as the
main queue. Up to AT_ONCE attributions run at a time. Further attributions, up to MOST_AT_ONCE in
total, start only for callers that have none running. Callers get equal shares of the time. The
attributions of one caller take turns, one piece each, so that a long one does not delay a short
one. A step computes at most one piece, after everything else. Then the engine only decodes for a
while (`scheduler.py`).
"""

from collections import deque

from logitd.model.inference.engine.queue import WaitingQueue
from logitd.model.inference.engine.sequence import Sequence, State

AT_ONCE = 2
"""Number of attributions that run at a time. It is small because an attribution keeps the residual
stream before every block in memory."""
MOST_AT_ONCE = 8
"""Limit on the total number of running attributions. It applies when the next one belongs to a
caller that has none running."""


class AttributionTurns:
    """Queues waiting attributions, and lets running attributions take turns."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self._running: dict[str, deque[Sequence]] = {}  # by caller, in the order of turns
        self._used: dict[str, float] = {}  # seconds by caller, in the order of their last turns

    @property
    def running(self) -> list[Sequence]:
        return [sequence for line in self._running.values() for sequence in line]

    def has_work(self) -> bool:
        """True if `next` would return a sequence."""
        return bool(self._running) or any(self.waiting.firsts())

    def next(self, now: float) -> Sequence | None:
        """Start as many waiting attributions as the limits allow. Returns the running attribution
        whose next piece is computed now."""
        while (first := self._first()) is not None:
            self.waiting.take(first)
            first.state = State.ATTRIBUTION
            first.admitted = now
            self._used.setdefault(first.request.caller, min(self._used.values(), default=0.0))
            self._running.setdefault(first.request.caller, deque()).append(first)
        if not self._running:
            return None
        caller = min(self._used, key=self._used.__getitem__)
        self._used[caller] = self._used.pop(caller)
        line = self._running[caller]
        line.rotate(-1)
        return line[-1]

    def charge(self, sequence: Sequence, seconds: float) -> None:
        """Charge the time of a piece to the sequence's caller. The sequence may have ended with
        this piece."""
        if sequence.request.caller in self._used:
            self._used[sequence.request.caller] += seconds

    def _first(self) -> Sequence | None:
        """The next attribution to begin; None if a limit is reached or none waits."""
        count = len(self.running)
        for sequence in self.waiting.firsts():
            most = AT_ONCE if sequence.request.caller in self._running else MOST_AT_ONCE
            if count < most:
                return sequence
        return None

    def remove(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            return
        caller = sequence.request.caller
        self._running[caller].remove(sequence)
        if not self._running[caller]:
            del self._running[caller], self._used[caller]
