"""EngineSession: the submissions of one HTTP request, all answered by one version of the weights.

The first submission fixes the version. The engine then keeps that version until the session is
closed or announces that no more submissions will follow. So all parts of a reply, such as the cells
of a sweep, come from the same weights. Use it only on the event loop.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from logitd.model.inference.engine.requests import Request
from logitd.service.engine.async_engine import AsyncEngine, WeightsVersion
from logitd.service.engine.submission import Submission
from logitd.service.engine.usage import Usage


class EngineSession:
    """Submits requests to one version of the weights; `usage` counts their work."""

    def __init__(
        self, engine: AsyncEngine, caller: str = "", deadline: float | None = None
    ) -> None:
        """All requests are submitted with this caller and deadline (on the engine's clock)."""
        self.usage = Usage()
        self._engine = engine
        self._signature: dict[str, Any] = {"caller": caller, "deadline": deadline}
        self._weights: WeightsVersion | None = None  # None until the first submission
        self._holds = False  # the engine keeps these weights for the session
        self._reserved: deque[Request] = deque()

    @property
    def version(self) -> int:
        """Number of the weights version that answers the request. Before the first submission, this
        is the engine's current version."""
        return self._engine.version if self._weights is None else self._weights.number

    @property
    def expired(self) -> bool:
        """True after the deadline of the session's requests."""
        deadline = self._signature["deadline"]
        return deadline is not None and self._engine.now() >= deadline

    def submit(self, requests: Sequence[Request], *, more: bool = False) -> Submission:
        """Queue all requests or none. Raises the same errors as `AsyncEngine.submit`. `more`
        announces further submissions."""
        signed = [replace(request, **self._signature) for request in requests]
        submission = self._engine.submit(signed, self._held(), self.usage)
        if not more:
            self.close()
        return submission

    def reserve(self, requests: Sequence[Request]) -> None:
        """Reserve room in the queue for requests that `submit_next` will submit one after another.
        The session may submit no other requests after this call. Raises the same errors as
        `AsyncEngine.reserve`."""
        signed = [replace(request, **self._signature) for request in requests]
        self._engine.reserve(signed, self._held())
        self._reserved.extend(signed)

    def submit_next(self) -> Submission:
        """Queue the next reserved request. Raises EngineStopped if it will not be answered."""
        submission = self._engine.submit_reserved(self._reserved[0], self._held(), self.usage)
        self._reserved.popleft()
        if not self._reserved:
            self.close()
        return submission

    def close(self) -> None:
        """Release the session's version of the weights, and end the reservations of requests that
        were not submitted. Nothing else may be submitted afterwards. Further calls have no
        effect."""
        self._engine.admission.release(self._reserved)
        self._reserved.clear()
        if self._holds and self._weights is not None:
            self._engine.end_hold(self._weights)
            self._holds = False

    def _held(self) -> WeightsVersion:
        if self._weights is None or not self._holds:
            self._weights = self._engine.hold()
            self._holds = True
        return self._weights
