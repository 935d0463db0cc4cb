"""ConstraintCache: compiled constraints, the most recently used ones, within a count and a size.

Belongs to the side that compiles (the server, or the worker where the engine has a
process of its own); one thread.
"""

from collections import OrderedDict

from logitd.model.inference.constraints.compiler import Constraint, Source

MAX_CONSTRAINTS = 32
MAX_BYTES = 2**27
"""Memory that compiling the cached constraints has taken, about."""


class ConstraintCache:
    """Constraints by their source."""

    def __init__(self) -> None:
        self._cached: OrderedDict[Source, Constraint] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of all together, about."""
        return self._size

    def __len__(self) -> int:
        return len(self._cached)

    def __contains__(self, source: Source) -> bool:
        return source in self._cached

    def get(self, source: Source) -> Constraint | None:
        """The constraint, if it is cached and its lexer can still learn."""
        if (constraint := self._cached.get(source)) is None:
            return None
        if constraint.lexer_exhausted:
            self._evict(source)
            return None
        self._cached.move_to_end(source)
        return constraint

    def put(self, constraint: Constraint) -> None:
        """Add a constraint, and evict the least recently used ones above the limits."""
        self._cached[constraint.source] = constraint
        self._size += constraint.size
        while len(self._cached) > MAX_CONSTRAINTS or self._size > MAX_BYTES:
            self._evict(next(iter(self._cached)))

    def _evict(self, source: Source) -> None:
        self._size -= self._cached.pop(source).size
