"""ReplyBudget: how much of a reply may be in memory, for one reply and for all of them.

Most replies are written while they are computed. Two kinds are held: arrays in which positions are
an inner axis (hidden states, attention weights), and lists of logprobs and of attributions. Both
are counted in elements of an output, as float32. Belongs to the event loop.
"""

from logitd.service.core.errors import bad_request, queue_full
from logitd.service.engine.admission import Limit

LOGPROB_ELEMENTS = 64
"""Elements that one listed logprob or attribution counts as: in memory it is an object with the
token's id, text and bytes."""


class ReplyBudget:
    """At most `limit` elements in one reply, and in the arrays that all replies hold together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def check_array(self, elements: int) -> None:
        """Reject (400) arrays that are larger than one reply may be."""
        if elements > self.limit:
            raise bad_request(
                f"the reply would have {elements} elements; {self.limit} are allowed. Ask for "
                "fewer layers, heads or positions, for float16 (which counts half), or raise "
                "--max-reply-elements"
            )

    def check_logprobs(self, count: int, param: str) -> None:
        """Reject (400) more logprobs than one reply may list; `param` asks for them."""
        self.check_listed(count, "logprobs", param)

    def check_listed(self, count: int, what: str, param: str) -> None:
        """The same for other things that are listed with their tokens; `what` names them."""
        if count * LOGPROB_ELEMENTS > self.limit:
            raise bad_request(
                f"the reply could list {count} {what}; {self.limit // LOGPROB_ELEMENTS} are "
                f"allowed ({LOGPROB_ELEMENTS} elements each). Ask for fewer, or raise "
                "--max-reply-elements",
                param,
            )

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
