"""TCP: what the kernel knows about a connection and a transport does not tell.

Linux only (`struct tcp_info` of linux/tcp.h); elsewhere every answer is None.
"""

import asyncio
import socket
import struct
import sys
from typing import NamedTuple

_GONE = (7, 8)
"""TCP_CLOSE: the client has reset the connection. TCP_CLOSE_WAIT: it has ended its side."""
_STATE, _ACKNOWLEDGED = struct.Struct("B"), struct.Struct("120xQ")


class TcpInfo(NamedTuple):
    """Whether the client has ended the connection, or its side of it; and the bytes of ours that it
    has acknowledged."""

    gone: bool
    acknowledged: int


def tcp_info(transport: asyncio.BaseTransport) -> TcpInfo | None:
    """Ask the kernel; None if it does not tell, or the socket is not TCP."""
    raw = transport.get_extra_info("socket")
    if sys.platform != "linux" or raw is None or raw.family == socket.AF_UNIX:
        return None
    try:
        answer = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:  # closed already
        return None
    if len(answer) < _ACKNOWLEDGED.size:
        return None
    (state,), (acknowledged,) = _STATE.unpack_from(answer), _ACKNOWLEDGED.unpack_from(answer)
    return TcpInfo(state in _GONE, acknowledged)
