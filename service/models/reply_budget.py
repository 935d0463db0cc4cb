"""ReplyBudget: elements that all replies together may hold in memory.

Most replies are written while they are computed. Arrays whose positions are an inner axis (hidden
states, attention weights) and the values of a sweep are held. Counted in elements, as float32.
Belongs to the event loop. The limit of one reply is checked when it is planned
(`model/operations/operation.py`).
"""

from logitd.service.engine.admission import Limit
from logitd.service.errors import queue_full


class ReplyBudget:
    """At most `limit` elements in the arrays that all replies hold together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, elements: int) -> None:
        """Count an array that a reply holds, or reject it (429) while there is no room for it."""
        if self.used + elements > self.limit:
            raise queue_full(
                f"the reply would hold {elements} elements; other replies hold {self.used} of the "
                f"{self.limit} allowed together. Try again in about 1 s",
                retry_after=1,
                limit=Limit.REPLIES,
            )
        self.used += elements

    def give_back(self, elements: int) -> None:
        """An array is no longer held."""
        self.used -= elements
