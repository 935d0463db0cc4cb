"""OpenConnections: all connections of a server, how many there may be, and one timer for them.

At the bound the connection that has waited longest for its client makes room: first one without a
request or with half a head, then one whose body is on its way, never one whose request is being
answered. Not here: what a connection does with its bytes (`protocol.py`).
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from itertools import islice
from typing import Protocol

from logitd.service.connections.limits import SURPLUS, ConnectionLimits
from logitd.service.metrics.metrics import ConnectionEnd, Metrics

logger = logging.getLogger("logitd.http")

QUIET_SECONDS = 10.0
"""Time between two lines of the log about a kind of ending; those in between are counted."""
LOOKED_AT = 32
"""Connections that are examined to find one that has read its last reply."""


class EvictionClass(Enum):
    """The cost to a client of ending its connection to make room for another."""

    WAITS = auto()
    """At most half a head, which it can send again."""
    SENDS = auto()
    """A body that is on its way."""
    ANSWERED = auto()
    """A reply that is being computed or sent: never evicted."""


class Watched(Protocol):
    """A connection, to OpenConnections."""

    def check(self, now: float) -> None:
        """End the connection if a deadline has passed by this time of the loop."""

    def abort(self) -> None:
        """Close the connection at once."""

    def unsent(self) -> int:
        """Bytes of replies that the kernel has not taken."""


class OpenConnections:
    """The connections of one server."""

    def __init__(self, limits: ConnectionLimits, metrics: Metrics) -> None:
        self.limits = limits
        self.reply_deadline = 0.0  # of replies that are being read at shutdown; loop time
        self.reports = Reports(limits, metrics)
        self._metrics = metrics
        self._open: dict[Watched, None] = {}
        self._evictable: dict[EvictionClass, OrderedDict[Watched, None]] = {
            EvictionClass.WAITS: OrderedDict(),
            EvictionClass.SENDS: OrderedDict(),
        }
        self._timer: asyncio.TimerHandle | None = None

    def has_room(self) -> bool:
        """True if the connections are within their bound, if need be after evicting one."""
        if len(self._open) > self.limits.max_connections:
            self._make_room()
        return len(self._open) <= self.limits.max_connections

    def opened(self, connection: Watched) -> None:
        """A connection was accepted; at the bound another one makes room for it."""
        if len(self._open) >= self.limits.max_connections:
            self._make_room()
        self._open[connection] = None
        self._metrics.connections.set(len(self._open))
        if len(self._open) > self.limits.max_connections + SURPLUS:
            self._end(connection, ConnectionEnd.REFUSED)
            return
        self.place(connection, EvictionClass.WAITS)
        if self._timer is None:
            self._sweep_later()

    def closed(self, connection: Watched) -> None:
        """A connection has ended; may be repeated."""
        self._open.pop(connection, None)
        for members in self._evictable.values():
            members.pop(connection, None)
        self._metrics.connections.set(len(self._open))

    def place(self, connection: Watched, wanted: EvictionClass) -> None:
        """Set a connection's class; within one, the first to enter makes room first."""
        if connection not in self._open:
            return
        for eviction, members in self._evictable.items():
            if eviction is wanted:
                members.setdefault(connection)
            else:
                members.pop(connection, None)

    def _make_room(self) -> None:
        for members in self._evictable.values():
            for connection in list(islice(members, LOOKED_AT)):
                if not connection.unsent():
                    self._end(connection, ConnectionEnd.MADE_ROOM)
                    return
                members.move_to_end(connection)

    def _end(self, connection: Watched, end: ConnectionEnd) -> None:
        self.reports.count(end)
        self.closed(connection)
        connection.abort()

    def _sweep_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.limits.sweep_interval, self._sweep)

    def _sweep(self) -> None:
        """Check all connections: a timer for each would be set and cancelled at every request."""
        self._timer = None
        if self._open or self.reports.pending:
            self._sweep_later()
        now = asyncio.get_running_loop().time()
        for connection in list(self._open):
            connection.check(now)
        self.reports.flush()


class Reports:
    """Counts connections that were ended, and now and then logs a line for each kind of ending."""

    def __init__(
        self,
        limits: ConnectionLimits,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._quiet_until: dict[ConnectionEnd, float] = {}
        self._unsaid: dict[ConnectionEnd, int] = {}
        sending, reading = limits.slow_sender_timeout, limits.slow_reader_timeout
        full = f"with {limits.max_connections} open"
        self._reasons = {
            ConnectionEnd.SILENT: f"nothing was sent for {sending:g} s",
            ConnectionEnd.SLOW_HEAD: "the headers of a request were not complete after "
            f"{sending:g} s",
            ConnectionEnd.SLOW_BODY: f"too little of a request's body came within {sending:g} s",
            ConnectionEnd.UNREAD: f"too little of a reply was read within {reading:g} s",
            ConnectionEnd.TOO_LARGE: "the headers of a request, or of its chunks, were too large",
            ConnectionEnd.NOT_HTTP: "what was sent was not HTTP",
            ConnectionEnd.MADE_ROOM: f"idle for longest, {full}; see --max-connections",
            ConnectionEnd.REFUSED: f"new, {full} that are all at work; see --max-connections",
        }

    @property
    def pending(self) -> bool:
        """True if the log has not said everything yet."""
        return bool(self._unsaid)

    def count(self, end: ConnectionEnd) -> None:
        """One connection was ended."""
        self._metrics.connections_ended.labels(end.value).inc()
        if end is not ConnectionEnd.IDLE:  # as every client does
            self._unsaid[end] = self._unsaid.get(end, 0) + 1
            self.flush()

    def flush(self) -> None:
        """Log what has not been said, if the last line about it is old enough."""
        now = self._clock()
        for end in list(self._unsaid):
            if now >= self._quiet_until.get(end, now):
                number = self._unsaid.pop(end)
                what = "a connection" if number == 1 else f"{number} connections"
                logger.warning("ended %s: %s", what, self._reasons[end])
                self._quiet_until[end] = now + QUIET_SECONDS
