"""Reading: tracks how much of its requests a client has sent, and how much of its replies it has
read.

This module only counts bytes and time; `protocol.py` decides what to do. `tcp_info` asks the kernel
about a connection.
"""

import asyncio
import socket
import struct
import sys
from enum import Enum, auto
from typing import NamedTuple

from logitd.service.body_writer import MIN_BYTES_PER_SECOND

MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of a request's target and headers, as counted by `head_size`. Requests with larger
ones are answered with 431."""
MAX_RAW_HEADER_BYTES = 2 * MAX_HEADER_BYTES
"""Maximum number of bytes received for incomplete headers, including white space and blank
lines."""
FRAMING_PER_BODY_BYTE = 8
"""Maximum number of framing bytes, such as chunk sizes, per byte of a chunked body. Chunks of one
byte need five."""
DISCARDED_BYTES = 2**20
"""Maximum number of bytes read and discarded after a refusal. Further bytes are not read."""

_GONE = (7, 8)
"""TCP states of a client that has disconnected. TCP_CLOSE: it reset the connection. TCP_CLOSE_WAIT:
it closed its side."""
_FIELDS = struct.Struct("B119xQ")  # tcpi_state, tcpi_bytes_acked


class ReadState(Enum):
    """The next part of a request that the server expects from the client."""

    REQUEST = auto()  # the first byte
    HEAD = auto()  # the rest of the request line and the headers
    BODY = auto()  # the rest of the body
    NOTHING = auto()  # the last answer was written or waits for its turn


class Reading:
    """The state of a connection's requests.

        REQUEST --first byte--> HEAD --headers complete--> BODY --message complete--> REQUEST
        any of them --stop--> NOTHING

    `since` is the time, on the event loop's clock, when the server began to wait for the client's
    next bytes. `received` counts all bytes.
    """

    def __init__(self, now: float) -> None:
        self.state = ReadState.REQUEST
        self.since = now
        self.received = 0
        self._unfinished = 0  # bytes of an incomplete head, chunk size or trailer
        self._completed = False  # the current piece completes a head or a message
        self._body_size = 0
        self._body_mark = (now, 0)  # (time, bytes received) at the start of the current body
        self.discard_until = 0  # number of bytes received; after `stop`, reading ends there

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
        """Note that a reply is complete, so that the server waits for the client's next request."""
        self.since, self._body_mark = now, (now, self.received)

    def stop(self) -> None:
        """Discard everything that the client sends from now on."""
        self.state = ReadState.NOTHING
        self.discard_until = self.received + DISCARDED_BYTES

    def is_too_large(self, piece: int) -> bool:
        """Count the bytes of a parsed piece. Returns True if too many have arrived without
        completing the headers, a chunk or the trailers. A piece that completes one of them is not
        counted, so the limit may be exceeded by up to one piece."""
        self._unfinished = 0 if self._completed else self._unfinished + piece
        self._completed = False
        allowed = MAX_RAW_HEADER_BYTES
        if self.state is ReadState.BODY:
            allowed += FRAMING_PER_BODY_BYTE * self._body_size
        return self._unfinished > allowed

    def is_body_slow(self, now: float, timeout: float, *, answered: bool, paused: bool) -> bool:
        """True if a body arrived more slowly than MIN_BYTES_PER_SECOND for `timeout` seconds. The
        timeout restarts whenever as many bytes have arrived as that rate requires, and does not run
        while the server has paused reading. Once the request has been answered, the timeout always
        runs and never restarts."""
        since, received = self._body_mark
        enough = self.received - received >= timeout * MIN_BYTES_PER_SECOND
        if not answered and (enough or paused):
            self._body_mark = (now, self.received)
            return False
        return now - since > timeout


class ReplyProgress:
    """Tracks how much of its replies a client has read. `since` is the time, on the event loop's
    clock, when unsent bytes were first noticed; None if there are none."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._mark: tuple[float, int] | None = None  # (time, bytes read at that time)

    def is_too_slow(
        self, now: float, timeout: float, unsent: int, acknowledged: int | None, *, complete: bool
    ) -> bool:
        """True if the client has read too little for longer than `timeout`. While the reply is
        incomplete, twice that time is allowed, because streams have their own, earlier timeout
        (`service/http/sse.py`). If `acknowledged` is None, a client is too slow only if it reads
        nothing."""
        if not unsent:
            self._mark = self.since = None
            return False
        self.since = now if self.since is None else self.since
        read, enough = acknowledged, timeout * MIN_BYTES_PER_SECOND
        if read is None:
            read, enough = unsent, 1
        if self._mark is None or abs(read - self._mark[1]) >= enough:
            self._mark = (now, read)
            return False
        return now - self._mark[0] > timeout * (1 if complete else 2)


class TcpInfo(NamedTuple):
    """The state of a connection in the kernel.

    gone          True if the client has reset the connection or closed its side of it
    acknowledged  number of bytes that the client has received
    """

    gone: bool
    acknowledged: int


def tcp_info(transport: asyncio.BaseTransport) -> TcpInfo | None:
    """Ask the kernel about a connection. Returns None if the system is not Linux, or if the socket
    is closed or not TCP."""
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
