"""WaitingQueue: the sequences that wait for a slot, in the order of admission.

By priority. Within a priority callers take turns, a sequence each turn, so nobody waits behind the
thousand requests of another caller; a new caller waits for one turn of each other caller at most.
Within a caller, first come, first served.

An evicted sequence (`scheduler.py`) returns to a lane of its own of its caller's line. The lanes of
new and of evicted sequences alternate, so neither can keep the other from going on. A third lane
holds the sequences that wait for other weights.

Every operation except iteration takes the same time for any length. Does not know whether there is
a slot.
"""

import bisect
from collections import OrderedDict
from collections.abc import Iterator

from logitd.model.inference.engine.sequence import Sequence


class _Line:
    def __init__(self) -> None:
        self._new: OrderedDict[Sequence, None] = OrderedDict()
        self._resumed: OrderedDict[Sequence, None] = OrderedDict()
        self._held: OrderedDict[Sequence, None] = OrderedDict()
        self._resumed_next = True

    def __bool__(self) -> bool:
        return bool(self._new or self._resumed or self._held)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resumed
        yield from self._new
        yield from self._held

    def push(self, sequence: Sequence, *, held: bool) -> None:
        lane = self._new if sequence.admitted is None else self._resumed
        (self._held if held else lane)[sequence] = None

    def release(self) -> None:
        self._new |= self._held
        self._held.clear()

    def first(self) -> Sequence | None:
        lanes = (self._resumed, self._new) if self._resumed_next else (self._new, self._resumed)
        return next((sequence for lane in lanes for sequence in lane), None)

    def take(self, sequence: Sequence) -> None:
        self._resumed_next = sequence in self._new
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        lanes = (self._new, self._resumed, self._held)
        del next(lane for lane in lanes if sequence in lane)[sequence]


class WaitingQueue:
    """Waiting sequences by priority and caller."""

    def __init__(self) -> None:
        self._lines: dict[int, OrderedDict[str, _Line]] = {}  # callers in the order of their turns
        self._priorities: list[int] = []  # of waiting sequences, ascending
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Every sequence, a caller's together."""
        for priority in self._priorities:
            for line in self._lines[priority].values():
                yield from line

    def push(self, sequence: Sequence, *, held: bool = False) -> None:
        """Queue behind all of the same caller and priority; `held` until `release`."""
        request = sequence.request
        if request.priority not in self._lines:
            bisect.insort(self._priorities, request.priority)
            self._lines[request.priority] = OrderedDict()
        self._lines[request.priority].setdefault(request.caller, _Line()).push(sequence, held=held)
        self._length += 1

    def release(self) -> None:
        for lines in self._lines.values():
            for line in lines.values():
                line.release()

    def firsts(self) -> Iterator[Sequence]:
        """The next sequence of each caller, in the order of turns, of the first priority that has
        any."""
        for priority in self._priorities:
            found = False
            for line in self._lines[priority].values():
                if (sequence := line.first()) is not None:
                    found = True
                    yield sequence
            if found:
                return

    def take(self, sequence: Sequence) -> None:
        """Admit a sequence of `firsts`; its caller's turn is over."""
        lines, caller = self._lines[sequence.request.priority], sequence.request.caller
        lines[caller].take(sequence)
        lines.move_to_end(caller)
        self._forget_empty(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._lines[sequence.request.priority][sequence.request.caller].remove(sequence)
        self._forget_empty(sequence)

    def _forget_empty(self, sequence: Sequence) -> None:
        """Account for a sequence that has left, and drop empty lines."""
        self._length -= 1
        priority, caller = sequence.request.priority, sequence.request.caller
        lines = self._lines[priority]
        if not lines[caller]:
            del lines[caller]
        if not lines:
            del self._lines[priority]
            self._priorities.remove(priority)
