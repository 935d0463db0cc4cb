"""TCP: facts about a connection that only the kernel knows (`struct tcp_info` of linux/tcp.h)."""

import asyncio
import socket
import struct
import sys
from typing import NamedTuple

_GONE = (7, 8)
"""TCP_CLOSE: the client has reset the connection. TCP_CLOSE_WAIT: it has ended its side."""
_FIELDS = struct.Struct("B119xQ")  # tcpi_state, tcpi_bytes_acked


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
