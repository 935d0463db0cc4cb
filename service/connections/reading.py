"""Reading: what a client has sent, what it has to send next, and whether it takes too long.

Counts the bytes of a head, of chunk sizes and of trailers before they are complete. Pure
bookkeeping: `protocol.py` decides what follows from it.
"""

from enum import Enum, auto

from logitd.service.connections.limits import (
    DISCARDED_BYTES,
    FRAMING_PER_BODY_BYTE,
    MAX_RAW_HEADER_BYTES,
    MIN_BYTES_PER_SECOND,
)


class ReadState(Enum):
    """The part of a request that a client has to send next."""

    REQUEST = auto()
    """A first byte."""
    HEAD = auto()
    """The rest of request line and headers."""
    BODY = auto()
    """The rest of the body."""
    NOTHING = auto()
    """Nothing more is parsed: the last answer is written, or waits for its turn."""


class Reading:
    """The state of a connection's requests.

        REQUEST --first byte--> HEAD --headers complete--> BODY --message complete--> REQUEST
        any of them --stop--> NOTHING

    `since` is the loop's time at which a request or the rest of a head began to be awaited;
    `received` counts all bytes.
    """

    def __init__(self, now: float) -> None:
        self.state = ReadState.REQUEST
        self.since = now
        self.received = 0
        self._unfinished = 0  # bytes of a head, chunk size or trailers that are not complete
        self._completed = False  # a head or a message, in the present piece
        self._body_size = 0
        self._body_mark = (now, 0)  # time and bytes received from which a body's progress counts
        self._discard_until = 0  # bytes received

    def begin_head(self, now: float) -> None:
        """The first byte of a request has come."""
        self.state, self.since = ReadState.HEAD, now

    def begin_body(self, now: float) -> None:
        """A head is complete."""
        self.state, self._completed, self._body_size = ReadState.BODY, True, 0
        self._body_mark = (now, self.received)

    def add_body(self, size: int) -> None:
        """Bytes of a body have come."""
        self._unfinished -= size
        self._body_size += size

    def end_message(self) -> None:
        """A request is complete."""
        self.state, self._completed = ReadState.REQUEST, True

    def end_reply(self, now: float) -> None:
        """A reply is complete: from now on the client is waited for."""
        self.since, self._body_mark = now, (now, self.received)

    def stop(self) -> None:
        """Discard what still comes."""
        self.state = ReadState.NOTHING
        self._discard_until = self.received + DISCARDED_BYTES

    def has_discarded_enough(self) -> bool:
        """True if the rest should stay with the client."""
        return self.received > self._discard_until

    def is_too_large(self, piece: int) -> bool:
        """Count the bytes of a piece that was parsed; True if too many have come without completing
        a head, a chunk or trailers. A piece that completes one is not counted: the bound is exact
        to a piece."""
        self._unfinished = 0 if self._completed else self._unfinished + piece
        self._completed = False
        allowed = MAX_RAW_HEADER_BYTES
        if self.state is ReadState.BODY:
            allowed += FRAMING_PER_BODY_BYTE * self._body_size
        return self._unfinished > allowed

    def is_body_slow(self, now: float, timeout: float, *, answered: bool, paused: bool) -> bool:
        """True if too little of a body came within `timeout` seconds. Progress, or a server that
        is not reading, gives it as long again, unless its request is answered already."""
        since, received = self._body_mark
        enough = self.received - received >= timeout * MIN_BYTES_PER_SECOND
        if not answered and (enough or paused):
            self._body_mark = (now, self.received)
            return False
        return now - since > timeout


class ReplyProgress:
    """How far a client has read its replies."""

    def __init__(self) -> None:
        self._mark: tuple[float, int, int] | None = None  # time, acknowledged and unsent bytes

    def is_too_slow(
        self, now: float, timeout: float, unsent: int, acknowledged: int | None, *, complete: bool
    ) -> bool:
        """True if too little was taken for longer than `timeout`, or twice that while the reply is
        not complete: streams have a timeout of their own (`service/http/sse.py`), which
        comes first. If `acknowledged` is not known, only a reader that takes nothing is noticed."""
        if not unsent:
            self._mark = None
            return False
        if self._mark is None:
            progress = True
        elif acknowledged is None:
            progress = unsent != self._mark[2]
        else:
            progress = acknowledged - self._mark[1] >= timeout * MIN_BYTES_PER_SECOND
        if progress or self._mark is None:
            self._mark = (now, acknowledged or 0, unsent)
            return False
        return now - self._mark[0] > timeout * (1 if complete else 2)
