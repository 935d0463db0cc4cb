"""WeightsVersion: one set of weights of a served model, from its loading to its end.

A request is answered by one version. A version stays as long as a lease says that more requests
will be submitted to it, or a request of it has not ended. Belongs to the event loop. Not here: who
loads and swaps weights (`driver.py`), and when (`AsyncEngine.reload`).
"""

import asyncio
from dataclasses import dataclass, field
from enum import IntEnum, auto

from logitd.service.engine.usage import Usage


class ReloadError(Exception):
    """New weights did not take over, and the present ones go on. The message says why."""


class State(IntEnum):
    """Stages in the life of a version, in their order."""

    LOADING = auto()
    CURRENT = auto()
    """Answers new requests. They wait in the engine until the version before is GONE."""
    RETIRING = auto()
    """A newer version is CURRENT. Leases may still submit requests to this one."""
    SEALED = auto()
    """No request may be submitted; those submitted before still run."""
    GONE = auto()
    """The engine has forgotten these weights."""


class WeightsVersion:
    """One version of the weights, and how many leases keep it.

                  loaded               the next one is loaded
        LOADING ----------> CURRENT --------------------------> RETIRING
           |                                                       |  the last lease has ended,
           | not loaded                                            |  or the time for that
           v                                                       v
        dropped             GONE <---------------------------- SEALED
                                  its last request has ended

    At most two versions exist at once: CURRENT, and the one before it (RETIRING or SEALED) or the
    next one (LOADING).
    """

    def __init__(self, number: int, state: State = State.LOADING) -> None:
        self.number = number
        self.state = state
        self.leases = 0
        self._failure: str | None = None
        self._changed = asyncio.Event()

    @property
    def accepts(self) -> bool:
        """True if requests may be submitted to this version."""
        return self.state in (State.CURRENT, State.RETIRING)

    def enter(self, state: State) -> None:
        """Enter the next state."""
        self.state = state
        self._changed.set()

    def fail(self, reason: str) -> None:
        """Make everyone who waits for a state raise ReloadError. The first reason stays."""
        self._failure = self._failure or reason
        self._changed.set()

    async def reach(self, state: State) -> None:
        """Wait for a state. Raises ReloadError if the version will not get there."""
        while self.state < state:
            if self._failure is not None:
                raise ReloadError(self._failure)
            self._changed.clear()
            await self._changed.wait()


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to submit requests to a version of the weights; `usage` counts them."""

    version: WeightsVersion
    usage: Usage = field(default_factory=Usage)
