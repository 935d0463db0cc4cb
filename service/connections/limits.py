"""Limits: bounds on connections, from the settings and the process's file descriptors.

Limits of requests are in `service/engine/admission.py` and `service/http/body.py`.
"""

import resource

from logitd.service.settings.serve import ServeSettings

MAX_HEADER_BYTES = 64 * 1024
"""Bytes of a request line and its headers, as counted by `head_size`; more is answered 431."""
MAX_RAW_HEADER_BYTES = 2 * MAX_HEADER_BYTES
"""Received bytes of incomplete headers: allows for white space and blank lines."""
FRAMING_PER_BODY_BYTE = 8
"""Bytes of chunk sizes per byte of a chunked body; chunks of one byte need five."""
DISCARDED_BYTES = 2**20
"""Bytes that are read and discarded after a refusal; the rest stays with the client."""
MIN_BYTES_PER_SECOND = 2048
"""Slowest accepted client, sending or reading: half of 32 kbit/s, to which mobile networks
throttle a line. 4 MiB may take 34 minutes."""
OWN_DESCRIPTORS = 64
"""File descriptors kept for the process: listening, static files, checkpoints, the engine."""
MOST_CONNECTIONS = 4096
"""Largest default of --max-connections: an idle connection takes about 10 kB."""
SURPLUS = 16
"""Connections above the bound, on which /health is still answered."""


class ConnectionLimitError(ValueError):
    """The process has too few file descriptors for --max-connections."""


def connection_bounds(settings: ServeSettings) -> tuple[int, int]:
    """The largest number of connections, and of connections that the kernel has completed but the
    server has not accepted (at worst it accepts all of those at once). Raises ConnectionLimitError.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = 2**20
    backlog = min(1024, descriptors // 4)
    room = descriptors - OWN_DESCRIPTORS - SURPLUS - backlog
    wanted = settings.max_connections or min(room, MOST_CONNECTIONS)
    if not 0 < wanted <= room:
        raise ConnectionLimitError(
            f"{settings.max_connections or 'any'} connections do not fit: of the {descriptors} "
            f"file descriptors of this process {descriptors - max(room, 0)} are reserved, so "
            f"{max(room, 0)} connections fit; raise the limit (ulimit -n), or lower "
            "--max-connections"
        )
    return wanted, backlog


def head_size(target: int, headers: list[tuple[bytes, bytes]]) -> int:
    """Bytes of a request line with a target of `target` bytes and of its headers, without optional
    white space."""
    return target + sum(len(name) + len(value) + 4 for name, value in headers)
