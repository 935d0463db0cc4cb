"""WaitingQueue: sequences that wait for a slot, in the order of admission.

Sequences with lower priority values are admitted first. Within a priority the callers take turns,
one sequence each, so that no caller waits behind a thousand requests of another: a new caller waits
for at most one turn of each other caller. The sequences of one caller are admitted in the order of
arrival.

Each caller has a line with three lanes: new sequences, evicted sequences that resume
(`scheduler.py`), and sequences held until new weights are in place. New and evicted sequences
alternate, so that neither lane blocks the other.

Every operation except iteration takes constant time. The queue does not know whether a slot is
free.
"""

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
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences. The sequences of a caller are adjacent within a priority."""
        for _, lines in sorted(self._lines.items()):
            for line in lines.values():
                yield from line

    def push(self, sequence: Sequence, *, held: bool = False) -> None:
        """Append to the line of the sequence's caller and priority. A `held` sequence is not
        admitted before `release`."""
        request = sequence.request
        lines = self._lines.setdefault(request.priority, OrderedDict())
        lines.setdefault(request.caller, _Line()).push(sequence, held=held)
        self._length += 1

    def release(self) -> None:
        for lines in self._lines.values():
            for line in lines.values():
                line.release()

    def firsts(self) -> Iterator[Sequence]:
        """The next sequence of each caller, in the order in which the callers take turns. All have
        the lowest priority value for which a sequence is ready."""
        for _, lines in sorted(self._lines.items()):
            found = False
            for line in lines.values():
                if (sequence := line.first()) is not None:
                    found = True
                    yield sequence
            if found:
                return

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that `firsts` returned, and end its caller's turn."""
        lines, caller = self._lines[sequence.request.priority], sequence.request.caller
        lines[caller].take(sequence)
        lines.move_to_end(caller)
        self._forget_empty(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._lines[sequence.request.priority][sequence.request.caller].remove(sequence)
        self._forget_empty(sequence)

    def _forget_empty(self, sequence: Sequence) -> None:
        """Update the length after a removal, and drop the sequence's line if it is empty."""
        self._length -= 1
        priority, caller = sequence.request.priority, sequence.request.caller
        lines = self._lines[priority]
        if not lines[caller]:
            del lines[caller]
        if not lines:
            del self._lines[priority]
