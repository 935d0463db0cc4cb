"""ByteBudget: what all replies together may hold in memory at once.

For replies that have to be held whole before they can be written. Belongs to the event loop.
"""

from service.core.errors import ApiError, bad_request


class ByteBudget:
    """At most `limit` bytes at once; a reply that alone is larger is refused for good."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def check_reply(self, nbytes: int) -> None:
        """Refuse (400) a reply that is larger than any may be."""
        if nbytes > self.limit:
            raise bad_request(
                f"the reply would have {nbytes} bytes; {self.limit} are allowed. Ask for fewer "
                "layers, heads or positions, for float16, or raise --max-reply-bytes"
            )

    def take(self, nbytes: int) -> None:
        """Count these bytes, or refuse (429) while there is no room for them."""
        if self.used + nbytes > self.limit:
            raise ApiError(
                429,
                "rate_limit_error",
                f"the reply would take {nbytes} bytes; others hold {self.used} of the "
                f"{self.limit} that replies may. Try again in about 1 s",
                None,
                "queue_full",
                retry_after=1,
            )
        self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        """These bytes are no longer held."""
        self.used -= nbytes
