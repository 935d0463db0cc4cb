"""Register: all open connections, how many there may be, and one look a second at each of them.

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
from typing import Protocol

from logitd.service.connections.limits import SURPLUS, ConnectionLimits
from logitd.service.core.metrics import ConnectionEnd, Metrics

logger = logging.getLogger("logitd.http")

QUIET_SECONDS = 10.0
"""From one line of the log about a kind of ending to the next; those in between are counted."""
LOOKED_AT = 32
"""Waiting connections that are looked at to find one that has read its last reply."""


class Standing(Enum):
    """What making room for another would cost a connection's client."""

    WAITS = auto()
    """At most half a head: it can send that again."""
    SENDS = auto()
    """A body that is on its way."""
    ANSWERED = auto()
    """A reply that is being computed or sent."""


class Watched(Protocol):
    """A connection, to the register."""

    def check(self, now: float) -> None:
        """End it, if a deadline has passed by this time of the loop."""

    def abort(self) -> None:
        """Close it at once."""

    def unsent(self) -> int:
        """Bytes of its reply that the kernel has not taken."""


class Register:
    """The connections of one server."""

    def __init__(self, limits: ConnectionLimits, metrics: Metrics) -> None:
        self.limits = limits
        self.reply_deadline = 0.0  # of replies that are being read at shutdown; loop time
        self.reports = Reports(limits, metrics)
        self._metrics = metrics
        self._open: dict[Watched, None] = {}
        self._waits: OrderedDict[Watched, None] = OrderedDict()
        self._sends: OrderedDict[Watched, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def has_room(self) -> bool:
        """Whether the connections are no more than they should be, if need be by ending one."""
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
        elif self._timer is None:
            self._sweep_later()

    def closed(self, connection: Watched) -> None:
        """A connection has ended; more than once changes nothing."""
        self._open.pop(connection, None)
        self._waits.pop(connection, None)
        self._sends.pop(connection, None)
        self._metrics.connections.set(len(self._open))

    def place(self, connection: Watched, standing: Standing) -> None:
        """A connection's standing has changed; within one, who came first makes room first."""
        if connection not in self._open:
            return
        self._waits.pop(connection, None)
        self._sends.pop(connection, None)
        if standing is Standing.WAITS:
            self._waits[connection] = None
        elif standing is Standing.SENDS:
            self._sends[connection] = None

    def _make_room(self) -> None:
        for members in (self._waits, self._sends):
            for connection in list(zip(members, range(LOOKED_AT), strict=False)):
                if connection[0].unsent():
                    members.move_to_end(connection[0])
                else:
                    self._end(connection[0], ConnectionEnd.MADE_ROOM)
                    return

    def _end(self, connection: Watched, end: ConnectionEnd) -> None:
        self.reports.count(end)
        self.closed(connection)
        connection.abort()

    def _sweep_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.limits.sweep_interval, self._sweep)

    def _sweep(self) -> None:
        """One timer for all: a timer for each would be set and cancelled with every request."""
        self._timer = None
        if self._open or self.reports.pending:
            self._sweep_later()
        now = asyncio.get_running_loop().time()
        for connection in list(self._open):
            connection.check(now)
        self.reports.flush()


class Reports:
    """Counts connections that were ended, and logs a line for a kind of ending once in a while."""

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
        self._sentences = _sentences(limits)

    @property
    def pending(self) -> bool:
        """Whether there is something that the log has not said yet."""
        return bool(self._unsaid)

    def count(self, end: ConnectionEnd) -> None:
        """One connection was ended."""
        self._metrics.connections_ended.labels(end.value).inc()
        if end is ConnectionEnd.IDLE:  # what every client does
            return
        self._unsaid[end] = self._unsaid.get(end, 0) + 1
        self.flush()

    def flush(self) -> None:
        """Say what has not been said, where the last line is long enough ago."""
        now = self._clock()
        for end in list(self._unsaid):
            if now >= self._quiet_until.get(end, now):
                number = self._unsaid.pop(end)
                what = "a connection" if number == 1 else f"{number} connections"
                logger.warning("ended %s: %s", what, self._sentences[end])
                self._quiet_until[end] = now + QUIET_SECONDS


def _sentences(limits: ConnectionLimits) -> dict[ConnectionEnd, str]:
    sending, reading = limits.slow_sender_timeout, limits.slow_reader_timeout
    return {
        ConnectionEnd.SILENT: f"nothing was sent for {sending:g} s",
        ConnectionEnd.SLOW_HEAD: f"the headers of a request were not complete after {sending:g} s",
        ConnectionEnd.SLOW_BODY: f"too little of a request's body came within {sending:g} s",
        ConnectionEnd.UNREAD: f"too little of a reply was read within {reading:g} s",
        ConnectionEnd.TOO_LARGE: "the headers of a request, or of its chunks, were too large",
        ConnectionEnd.NOT_HTTP: "what was sent was not HTTP",
        ConnectionEnd.MADE_ROOM: f"idle for longest, with {limits.max_connections} open; "
        "see --max-connections",
        ConnectionEnd.REFUSED: f"new, with {limits.max_connections} open that are all at work; "
        "see --max-connections",
    }
