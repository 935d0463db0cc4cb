"""Reading: the progress of a client, sending requests and reading replies.

Counts bytes and time only; `protocol.py` decides what follows. `tcp_info` returns what the kernel
knows about a connection.
"""

import asyncio
import socket
import struct
import sys
from enum import Enum, auto
from typing import NamedTuple

from logitd.service.connections.limits import (
    DISCARDED_BYTES,
    FRAMING_PER_BODY_BYTE,
    MAX_RAW_HEADER_BYTES,
    MIN_BYTES_PER_SECOND,
)

_GONE = (7, 8)
"""TCP_CLOSE: the client has reset the connection. TCP_CLOSE_WAIT: it has ended its side."""
_FIELDS = struct.Struct("B119xQ")  # tcpi_state, tcpi_bytes_acked


class ReadState(Enum):
    """The part of a request that the client sends next."""

    REQUEST = auto()
    """The first byte."""
    HEAD = auto()
    """The rest of the request line and the headers."""
    BODY = auto()
    """The rest of the body."""
    NOTHING = auto()
    """The last answer is written or waits for its turn: nothing more is parsed."""


class Reading:
    """The state of a connection's requests.

        REQUEST --first byte--> HEAD --headers complete--> BODY --message complete--> REQUEST
        any of them --stop--> NOTHING

    `since` is the loop's time from which the client's next bytes are awaited; `received` counts all
    bytes.
    """

    def __init__(self, now: float) -> None:
        self.state = ReadState.REQUEST
        self.since = now
        self.received = 0
        self._unfinished = 0  # bytes of an incomplete head, chunk size or trailer
        self._completed = False  # a head or a message, in the current piece
        self._body_size = 0
        self._body_mark = (now, 0)  # time and bytes received; start of the current body's rate
        self._discard_until = 0  # bytes received

    def begin_head(self, now: float) -> None:
        self.state, self.since = ReadState.HEAD, now

    def begin_body(self, now: float) -> None:
        self.state, self._completed, self._body_size = ReadState.BODY, True, 0
        self._body_mark = (now, self.received)

    def add_body(self, size: int) -> None:
        self._unfinished -= size
        self._body_size += size

    def end_message(self) -> None:
        self.state, self._completed = ReadState.REQUEST, True

    def end_reply(self, now: float) -> None:
        """Note a complete reply: the client has the next turn."""
        self.since, self._body_mark = now, (now, self.received)

    def stop(self) -> None:
        """Discard everything that still comes."""
        self.state = ReadState.NOTHING
        self._discard_until = self.received + DISCARDED_BYTES

    def has_discarded_enough(self) -> bool:
        return self.received > self._discard_until

    def is_too_large(self, piece: int) -> bool:
        """Count the bytes of a parsed piece. True if too many have come without completing a head,
        a chunk or trailers. A piece that completes one does not count, so the bound is exact up to
        one piece."""
        self._unfinished = 0 if self._completed else self._unfinished + piece
        self._completed = False
        allowed = MAX_RAW_HEADER_BYTES
        if self.state is ReadState.BODY:
            allowed += FRAMING_PER_BODY_BYTE * self._body_size
        return self._unfinished > allowed

    def is_body_slow(self, now: float, timeout: float, *, answered: bool, paused: bool) -> bool:
        """True if too little of a body came within `timeout` seconds. The time starts again after
        enough progress, and while the server is not reading, unless the request is answered."""
        since, received = self._body_mark
        enough = self.received - received >= timeout * MIN_BYTES_PER_SECOND
        if not answered and (enough or paused):
            self._body_mark = (now, self.received)
            return False
        return now - since > timeout


class ReplyProgress:
    """The progress of a client in reading its replies."""

    def __init__(self) -> None:
        self._mark: tuple[float, int, int] | None = None  # time, acknowledged and unsent bytes

    def is_too_slow(
        self, now: float, timeout: float, unsent: int, acknowledged: int | None, *, complete: bool
    ) -> bool:
        """True if too little was read for longer than `timeout`, or for twice that while the reply
        is incomplete: streams have an earlier timeout of their own (`service/http/sse.py`). Without
        `acknowledged`, only a reader that takes nothing is too slow."""
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


class TcpInfo(NamedTuple):
    """`gone`: the client has ended the connection or its side of it; `acknowledged`: bytes that it
    has received."""

    gone: bool
    acknowledged: int


def tcp_info(transport: asyncio.BaseTransport) -> TcpInfo | None:
    """Ask the kernel. None if the system is not Linux or the socket is closed or not TCP."""
    raw = transport.get_extra_info("socket")
    if sys.platform != "linux" or raw is None or raw.family == socket.AF_UNIX:
        return None
    try:
        answer = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FIELDS.size)
    except OSError:
        return None
    if len(answer) < _FIELDS.size:
        return None
    state, acknowledged = _FIELDS.unpack(answer)
    return TcpInfo(state in _GONE, acknowledged)
