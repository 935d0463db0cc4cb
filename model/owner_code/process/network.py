"""Network: blocks network access of this process with an audit hook and, if the system allows it,
with a separate network namespace."""

import ctypes
import sys
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NETWORK_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto")


def leave_network() -> None:
    """Block network access until the process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET)

    def refuse(event: str, arguments: Any) -> None:
        if event in NETWORK_EVENTS:
            raise PermissionError(f"no network here ({event})")

    sys.addaudithook(refuse)
