"""ConstraintCache: what was compiled, the most recently used, within a number and a size.

Belongs to whoever compiles (`constraints` on the event loop, `engine_worker` where the engine has a
process of its own); one thread.
"""

from collections import OrderedDict

from model.inference.constraints.compiler import Constraint, Source

MAX_KEPT = 32
MAX_BYTES = 2**27
"""Memory that compiling what is kept has taken, about."""


class ConstraintCache:
    """Constraints by their source."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Source, Constraint] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of all together, about."""
        return self._size

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, source: Source) -> bool:
        return source in self._kept

    def get(self, source: Source) -> Constraint | None:
        """The constraint, if it is there and its lexer can still learn."""
        if (constraint := self._kept.get(source)) is None:
            return None
        if constraint.lexer_exhausted:
            self._forget(source)
            return None
        self._kept.move_to_end(source)
        return constraint

    def keep(self, constraint: Constraint) -> None:
        """Keep it, and let go of those that were not used for longest where it gets too much."""
        self._kept[constraint.source] = constraint
        self._size += constraint.size
        while len(self._kept) > MAX_KEPT or self._size > MAX_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, source: Source) -> None:
        self._size -= self._kept.pop(source).size
