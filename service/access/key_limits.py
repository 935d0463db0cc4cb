"""KeyLimits: limits the requests per minute and the concurrent requests of each API key.

Requests above the limits are answered with 429. The message names the key and the limit that it
exceeded; other keys are not affected. Only requests that need computation are counted (`counts` in
`auth.py`). The allowance of a key refills at a constant rate (a leaky bucket), so a key that was
idle for a minute may send a whole minute's requests at once. Call KeyLimits only on the event loop.
`service/engine/admission.py` has the limits of the queue.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from logitd.service.engine.admission import Limit
from logitd.service.errors import queue_full

KEY_LIMIT = "rate_limit_exceeded"
"""Error code of the replies to rejected requests."""


@dataclass(frozen=True, slots=True)
class KeyLimit:
    """The limits of a key. 0 means unlimited; None means the default for all keys.

    per_minute  requests per minute
    at_once     concurrent requests
    """

    per_minute: int | None = None
    at_once: int | None = None


@dataclass(slots=True)
class _Spent:
    """How much a key has used: `used` is the level of its leaky bucket at the time `moment`; `open`
    is the number of its requests that are being answered."""

    used: float
    moment: float
    open: int = 0


class KeyLimits:
    """Counts the requests of each key."""

    def __init__(
        self,
        default: KeyLimit,
        own: Mapping[str, KeyLimit],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own` maps names of keys to limits other than the default."""
        self._default = default
        self._own = own
        self._clock = clock
        self._spent: dict[str, _Spent] = {}

    def of(self, name: str) -> tuple[int, int]:
        """Requests per minute and concurrent requests of a key; 0 means unlimited."""
        own, other = self._own.get(name, self._default), self._default
        per_minute = other.per_minute if own.per_minute is None else own.per_minute
        at_once = other.at_once if own.at_once is None else own.at_once
        return per_minute or 0, at_once or 0

    def replace(self, own: Mapping[str, KeyLimit]) -> None:
        """Change the limits of keys. Requests that were already received still count."""
        self._own = own

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Count a request of a key; until the context ends, it also counts as concurrent. Raises
        ApiError (429) if the request would exceed a limit; rejected requests are not counted."""
        (per_minute, at_once), spent = self.of(name), self._as_of_now(name)
        if at_once and spent.open >= at_once:
            raise queue_full(
                f"the key {name!r} may have {at_once} concurrent requests and has {spent.open}; "
                "wait until one of them ends",
                1,
                Limit.KEY_AT_ONCE,
                KEY_LIMIT,
            )
        if per_minute:
            if spent.used + 1 > per_minute:
                wait = math.ceil((spent.used + 1 - per_minute) * 60 / per_minute)
                raise queue_full(
                    f"the key {name!r} may send {per_minute} requests per minute and has used "
                    f"them up; try again in about {wait} s",
                    wait,
                    Limit.KEY_PER_MINUTE,
                    KEY_LIMIT,
                )
            spent.used += 1
        spent.open += 1
        try:
            yield
        finally:
            spent.open -= 1

    def _as_of_now(self, name: str) -> _Spent:
        now, (per_minute, _) = self._clock(), self.of(name)
        spent = self._spent.setdefault(name, _Spent(0.0, now))
        left = spent.used - (now - spent.moment) * per_minute / 60
        spent.used = min(max(left, 0.0), per_minute)  # the limit may have been higher before
        spent.moment = now
        return spent
