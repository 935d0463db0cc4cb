"""Limits: the bounds on connections, from settings and from the process's file descriptors.

Not here: limits of what is asked for (`service/engine/admission.py`, `service/http/body.py`).
"""

import resource
from dataclasses import dataclass

from logitd.service.settings.serve import ServeSettings

MAX_HEADER_BYTES = 64 * 1024
"""Request line and headers of one request, as `head_size` counts them; more is answered 431."""
MAX_RAW_HEADER_BYTES = 2 * MAX_HEADER_BYTES
"""Bytes that come without completing a head: white space and blank lines have room as well."""
FRAMING_PER_BODY_BYTE = 8
"""Bytes of chunk sizes for each byte of a chunked body: chunks of one byte take five."""
DISCARDED_BYTES = 2**20
"""Bytes that are read and discarded after a refusal; the rest stays with the client."""
MIN_BYTES_PER_SECOND = 2048
"""Slowest client that is served, sending or reading: half of 32 kbit/s, to which mobile networks
throttle a line. 4 MiB may take 34 minutes."""
OWN_DESCRIPTORS = 64
"""File descriptors of the process itself: listening, static files, checkpoints, the engine."""
MOST_CONNECTIONS = 4096
"""Default for any number of descriptors: an idle connection takes about 10 kB."""
SURPLUS = 16
"""Connections above the bound at which /health is still answered."""


class ConnectionLimitError(ValueError):
    """The process has too few file descriptors for the connections it is told to accept."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on the number of connections, and timeouts in seconds. `backlog` counts connections
    that the kernel completes before they are accepted, all at once at worst."""

    max_connections: int
    backlog: int
    slow_sender_timeout: float
    slow_reader_timeout: float
    keep_alive_timeout: float

    @property
    def sweep_interval(self) -> float:
        """Seconds between two checks of all connections."""
        timeouts = (self.slow_sender_timeout, self.slow_reader_timeout, self.keep_alive_timeout)
        return min(1.0, min(timeouts) / 4)


def connection_limits(settings: ServeSettings) -> ConnectionLimits:
    """The limits of a server. Raises ConnectionLimitError if its descriptors do not suffice."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = 2**20
    backlog = min(1024, descriptors // 4)
    room = descriptors - OWN_DESCRIPTORS - SURPLUS - backlog
    wanted = settings.max_connections or min(room, MOST_CONNECTIONS)
    if not 0 < wanted <= room:
        raise ConnectionLimitError(
            f"{settings.max_connections or 'any'} connections do not fit: of the {descriptors} "
            f"file descriptors of this process {descriptors - max(room, 0)} are kept back, so "
            f"{max(room, 0)} connections fit; raise the limit (ulimit -n), or lower "
            "--max-connections"
        )
    return ConnectionLimits(
        max_connections=wanted,
        backlog=backlog,
        slow_sender_timeout=settings.slow_sender_timeout,
        slow_reader_timeout=settings.slow_reader_timeout,
        keep_alive_timeout=settings.keep_alive_timeout,
    )


def head_size(target: int, headers: list[tuple[bytes, bytes]]) -> int:
    """Bytes of a head whose request target has `target` bytes: what its parts need with a line
    each, without white space that means nothing."""
    return target + sum(len(name) + len(value) + 4 for name, value in headers)
