"""Restarts: another engine where one is gone with its process.

A process can be killed, by whoever looks for memory or by a bug in native code. Its requests are
lost; the next ones need not be. So the engine's process is started again, `most` times within
WINDOW seconds, after longer and longer pauses. What needs more has a cause that a restart does not
mend, and ends the server (`service/app/server.py`). Not here: who is told (`async_engine.py`).
"""

import logging
import threading
import time
from collections.abc import Callable

from logitd.service.engine.driver import EngineDriver, EngineLost

logger = logging.getLogger("logitd.engine")

WINDOW = 600.0
"""Seconds within which restarts are counted."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before the second restart within the window, twice as long before each after it; there is
none before the first."""


class Restarts:
    """How often `make` may give another driver. It raises EngineLost, or what else makes another
    try pointless."""

    def __init__(
        self,
        make: Callable[[], EngineDriver],
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._most = most
        self._clock = clock
        self._times: list[float] = []  # of the restarts within the window
        self._leaving = threading.Event()

    def leave(self) -> None:
        """The server ends: there will be no other driver. From any thread."""
        self._leaving.set()

    def another(self) -> EngineDriver | None:
        """Another driver, after a pause; None when the server is about to end. Raises EngineLost
        where there were too many."""
        while True:
            now = self._clock()
            self._times = [at for at in self._times if now - at < WINDOW]
            count = len(self._times)
            if count >= self._most:
                raise EngineLost(
                    f"the engine's process is gone, and was started again {count} times within "
                    f"{WINDOW / 60:g} minutes; --engine-restarts allows {self._most}"
                )
            pause = min(FIRST_PAUSE * 2 ** (count - 1), LONGEST_PAUSE) if count else 0.0
            if self._leaving.wait(pause):
                return None
            self._times.append(now)
            try:
                driver = self._make()
            except EngineLost as error:
                logger.error("the engine's process could not be started again: %s", error)
            else:
                logger.warning(
                    "the engine's process was started again (%d of %d within %g minutes)",
                    count + 1, self._most, WINDOW / 60,
                )  # fmt: skip
                return driver
