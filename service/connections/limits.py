"""Limits of connections, which follow from the settings and the process's file descriptors.

`service/engine/admission.py` and `service/http/body.py` limit requests.
"""

import resource

from logitd.service.settings.serve import ServeSettings

MAX_HEADER_BYTES = 64 * 1024
"""Most bytes of a request line and its headers, as `head_size` counts them. Larger ones are
answered 431."""
MAX_RAW_HEADER_BYTES = 2 * MAX_HEADER_BYTES
"""Most bytes that are received of incomplete headers. They include white space and blank lines."""
FRAMING_PER_BODY_BYTE = 8
"""Most bytes of chunk sizes per byte of a chunked body. Chunks of one byte need five."""
DISCARDED_BYTES = 2**20
"""After a refusal, at most this many bytes are read and discarded. Further bytes are not read."""
MIN_BYTES_PER_SECOND = 2048
"""A client has to send and to read at least this fast: half of 32 kbit/s, to which mobile networks
throttle a line. So 4 MiB may take 34 minutes."""
OWN_DESCRIPTORS = 64
"""File descriptors that the process needs itself: for listening, static files, checkpoints and the
engine."""
MOST_CONNECTIONS = 4096
"""Upper bound for the default of --max-connections. An idle connection takes about 10 kB."""
SURPLUS = 16
"""Number of connections above the limit on which /health is still answered."""


class ConnectionLimitError(ValueError):
    """The process has too few file descriptors for --max-connections."""


def connection_bounds(settings: ServeSettings) -> tuple[int, int]:
    """The largest number of connections, and the largest number of connections that the kernel
    keeps until the server accepts them (it may accept all of them at once). Raises
    ConnectionLimitError.
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
    """The size of a request line whose target has `target` bytes, and of the headers, in bytes and
    without optional white space."""
    return target + sum(len(name) + len(value) + 4 for name, value in headers)
