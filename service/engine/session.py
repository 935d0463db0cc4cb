"""EngineSession: one HTTP request's way to the engine, answered by one version of the weights.

The first submission settles the version. The engine keeps it until the session is closed, or says
that no other submission follows: so a sweep of many prompts has one answer. Belongs to the event
loop. Not here: how weights change (`versions.py`).
"""

from collections.abc import Sequence

from logitd.model.inference.engine.requests import Request
from logitd.service.engine.async_engine import AsyncEngine, Reservation
from logitd.service.engine.submission import Submission
from logitd.service.engine.usage import Usage
from logitd.service.engine.versions import Lease


class EngineSession:
    """Submits requests to one version of the weights; `usage` counts them."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.usage = Usage()
        self._engine = engine
        self._lease: Lease | None = None
        self._version: int | None = None  # None until the first submission

    @property
    def version(self) -> int:
        """Number of the version that answers; the current one before the first submission."""
        return self._engine.version if self._version is None else self._version

    def submit(self, requests: Sequence[Request], *, more: bool = False) -> Submission:
        """Queue requests, all or none; raises as `AsyncEngine.submit` does. `more`: other requests
        for the same weights will follow."""
        submission = self._engine.submit(requests, self._leased())
        if not more:
            self.close()
        return submission

    def reserve(self, requests: Sequence[Request]) -> Reservation:
        """Reserve room for requests that run one after another; nothing else may follow them."""
        reservation = self._engine.reserve(requests, self._leased())
        self._lease = None  # now the reservation's
        return reservation

    def close(self) -> None:
        """Say that nothing else will be submitted. May be repeated."""
        if self._lease is not None:
            self._engine.end_lease(self._lease)
            self._lease = None

    def _leased(self) -> Lease:
        if self._lease is None:
            self._lease = self._engine.lease(self.usage)
            self._version = self._lease.version.number
        return self._lease
