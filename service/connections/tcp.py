"""TCP: what the kernel knows about a connection and a transport does not tell.

Linux alone (`struct tcp_info` of linux/tcp.h); elsewhere every answer is None.
"""

import asyncio
import socket
import struct
import sys
from dataclasses import dataclass

RESET = 7
"""TCP_CLOSE: the other side has answered with a reset."""
CLOSE_WAIT = 8
"""The other side says no more."""
_STATE, _IN_FLIGHT = struct.Struct("B"), struct.Struct("24xI")
_ACKNOWLEDGED = struct.Struct("120xQ")


@dataclass(frozen=True)
class TcpInfo:
    """The state of a connection, the bytes that the other side has acknowledged of ours, and the
    segments on their way to it that it has not."""

    state: int
    acknowledged: int
    in_flight: int


def tcp_info(transport: asyncio.BaseTransport) -> TcpInfo | None:
    """What the kernel says; None where it does not, or the socket is not TCP."""
    raw = transport.get_extra_info("socket")
    if sys.platform != "linux" or raw is None or raw.family == socket.AF_UNIX:
        return None
    try:
        answer = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:  # closed already
        return None
    if len(answer) < _ACKNOWLEDGED.size:
        return None
    (state,), (in_flight,) = _STATE.unpack_from(answer), _IN_FLIGHT.unpack_from(answer)
    (acknowledged,) = _ACKNOWLEDGED.unpack_from(answer)
    return TcpInfo(state, acknowledged, in_flight)
