"""OpenConnections: all connections of a server, the limit on their number, and a timer that checks
them.

The limit follows from the settings and the process's file descriptors. When the limit is reached,
the connection that has waited longest for its client is closed. Connections without complete
headers are closed first, then connections with an incomplete body. A connection whose request is
being answered is never closed.
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from logitd.service.metrics.metrics import ConnectionEnd, Metrics
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd.http")

OWN_DESCRIPTORS = 64
"""Number of file descriptors reserved for the process itself: for listening, static files,
checkpoints and the engine."""
MOST_CONNECTIONS = 4096
"""Upper bound on the default of --max-connections. An idle connection takes about 10 kB."""
SURPLUS = 16
"""Number of connections that are accepted above the limit, so that /health is still answered."""

HELD_BYTES = 2**28
"""Maximum number of bytes in memory for all replies that clients are still reading. Above it, the
server closes connections whose replies take more than an equal share of it, beginning with the
clients that have been reading for the longest time."""

QUIET_SECONDS = 10.0
"""Minimum time between two log lines about ended connections."""


class ConnectionLimitError(ValueError):
    """Raised if the process has too few file descriptors for --max-connections."""


def connection_bounds(settings: ServeSettings) -> tuple[int, int]:
    """The maximum number of connections, and the maximum length of the kernel's queue of
    connections that wait to be accepted. File descriptors are reserved for that queue, because the
    server may accept all of it at once. Raises ConnectionLimitError.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = 2**20
    backlog = min(1024, descriptors // 4)
    room = descriptors - OWN_DESCRIPTORS - SURPLUS - backlog
    wanted = settings.max_connections or min(room, MOST_CONNECTIONS)
    if not 0 < wanted <= room:
        raise ConnectionLimitError(
            f"too few file descriptors for {settings.max_connections or 'any'} connections: this "
            f"process has {descriptors} file descriptors, of which {descriptors - max(room, 0)} "
            f"are reserved, so {max(room, 0)} connections fit; raise the limit (ulimit -n), or "
            "lower --max-connections"
        )
    return wanted, backlog


class EvictionClass(Enum):
    """What the client loses if its connection is evicted, that is, closed to make room for another
    connection."""

    WAITS = auto()  # nothing, or incomplete headers
    SENDS = auto()  # an incomplete body
    ANSWERED = auto()  # a reply that is being computed or sent: never evicted


class Connection(Protocol):
    """The methods of a connection that OpenConnections calls. `protocol.py` documents them."""

    transport: asyncio.Transport

    def check(self, now: float) -> None: ...
    def unsent(self) -> int: ...
    def held(self) -> int: ...
    def reads_since(self) -> float: ...


class OpenConnections:
    """The connections of one server."""

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        """Raises ConnectionLimitError."""
        self.settings = settings
        self.most, self.backlog = connection_bounds(settings)
        self.reply_deadline = 0.0  # loop time until which clients may read replies at shutdown
        self.reports = Reports(settings, self.most, metrics)
        self._metrics = metrics
        self._open: dict[Connection, None] = {}
        self._evictable: dict[EvictionClass, dict[Connection, None]] = {
            EvictionClass.WAITS: {},
            EvictionClass.SENDS: {},
        }
        self._timer: asyncio.TimerHandle | None = None

    def has_room(self) -> bool:
        """True if the number of connections is within the limit, after evicting one if
        necessary."""
        if len(self._open) > self.most:
            self._make_room()
        return len(self._open) <= self.most

    def opened(self, connection: Connection) -> None:
        """Add an accepted connection, evicting another one if the limit is reached."""
        if len(self._open) >= self.most:
            self._make_room()
        self._open[connection] = None
        self._metrics.connections.set(len(self._open))
        if len(self._open) > self.most + SURPLUS:
            self._end(connection, ConnectionEnd.REFUSED)
            return
        self.place(connection, EvictionClass.WAITS)
        if self._timer is None:
            self._sweep_later()

    def closed(self, connection: Connection) -> None:
        """Remove a connection that has ended. Further calls have no effect."""
        self.place(connection, EvictionClass.ANSWERED)
        self._open.pop(connection, None)
        self._metrics.connections.set(len(self._open))

    def place(self, connection: Connection, wanted: EvictionClass) -> None:
        """Put an open connection into an eviction class. Within a class, the oldest member is
        evicted first."""
        if connection not in self._open:
            return
        for eviction, members in self._evictable.items():
            if eviction is wanted:
                members.setdefault(connection)
            else:
                members.pop(connection, None)

    def _make_room(self) -> None:
        for members in self._evictable.values():
            for connection in members:
                if not connection.unsent():  # otherwise the client is still reading its last reply
                    self._end(connection, ConnectionEnd.MADE_ROOM)
                    return

    def _end(self, connection: Connection, end: ConnectionEnd) -> None:
        self.reports.count(end)
        self.closed(connection)
        connection.transport.abort()

    def _sweep_later(self) -> None:
        timeouts = (
            self.settings.slow_sender_timeout,
            self.settings.slow_reader_timeout,
            self.settings.keep_alive_timeout,
        )
        interval = min(1.0, min(timeouts) / 4)
        self._timer = asyncio.get_running_loop().call_later(interval, self._sweep)

    def _sweep(self) -> None:
        """Check all connections. If each connection had its own timer, every request would set and
        cancel a timer."""
        self._timer = None
        if self._open or self.reports.pending:
            self._sweep_later()
        now = asyncio.get_running_loop().time()
        for connection in list(self._open):
            connection.check(now)
        self._limit_held()
        self.reports.flush()

    def _limit_held(self) -> None:
        held = {each: size for each in self._open if (size := each.held())}
        excess = sum(held.values()) - HELD_BYTES
        if excess <= 0:
            return
        share = HELD_BYTES // len(held)
        for connection in sorted(held, key=lambda each: each.reads_since()):
            if excess > 0 and held[connection] > share:
                excess -= held[connection]
                self._end(connection, ConnectionEnd.HELD)


class Reports:
    """Counts ended connections, and logs each reason at most once every QUIET_SECONDS."""

    def __init__(
        self,
        settings: ServeSettings,
        most: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._quiet_until = 0.0
        self.pending: Counter[ConnectionEnd] = Counter()  # not logged yet
        sending, reading = settings.slow_sender_timeout, settings.slow_reader_timeout
        full = f"with {most} connections open"
        self._reasons = {
            ConnectionEnd.SILENT: f"no request came within {sending:g} s",
            ConnectionEnd.SLOW_HEAD: f"the headers were not complete after {sending:g} s",
            ConnectionEnd.SLOW_BODY: f"too little of a request's body came within {sending:g} s",
            ConnectionEnd.UNREAD: f"too little of a reply was read within {reading:g} s",
            ConnectionEnd.HELD: f"unread replies took more than {HELD_BYTES >> 20} MiB together",
            ConnectionEnd.TOO_LARGE: "the headers or chunk headers of a request were too large",
            ConnectionEnd.NOT_HTTP: "the request was not HTTP",
            ConnectionEnd.MADE_ROOM: f"idle for the longest time {full}; see --max-connections",
            ConnectionEnd.REFUSED: f"opened {full}, all of them busy; see --max-connections",
        }

    def count(self, end: ConnectionEnd) -> None:
        self._metrics.connections_ended.labels(end.value).inc()
        if end in self._reasons:  # every client has idle connections
            self.pending[end] += 1
            self.flush()

    def flush(self) -> None:
        """Log the counts that are not logged yet, unless the last report is less than QUIET_SECONDS
        old."""
        now = self._clock()
        if self.pending and now >= self._quiet_until:
            for end, number in self.pending.items():
                subject = "a connection" if number == 1 else f"{number} connections"
                logger.warning("ended %s: %s", subject, self._reasons[end])
            self.pending.clear()
            self._quiet_until = now + QUIET_SECONDS
