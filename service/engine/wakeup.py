"""WakeupThrottle: limits how often the engine's thread wakes the event loop.

For a small model, Python takes as long to send a token as the model takes to compute it, and both
need the same interpreter. So the event loop may spend at most a sixteenth of its time on delivery:
after each delivery it pauses for PAUSE_FACTOR times the processor time that the delivery took, but
for at most MAX_PAUSE, and then delivers everything that has arrived. If steps are longer than the
pause, nothing is delayed. Urgent items (first tokens, results, ends) do not wait for the end of a
pause; other items do.

The engine's thread calls `wake` when it starts to compute and no longer needs the interpreter. If
it woke the loop earlier, the loop would use the interpreter while the thread prepares its step, and
all cores would be idle.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

PAUSE_FACTOR = 15
"""Length of a pause as a multiple of the duration of the delivery before it."""
MAX_PAUSE = 0.04
"""Longest pause in seconds. Even then, a stream's text grows 25 times a second, which looks
smooth."""
MIN_TIMER = 0.002
"""Shortest timer in seconds: event loops measure time only in milliseconds."""


class WakeupThrottle:
    """Passes items from one thread to the event loop with few wake-ups.

    The state is the time from which `wake` may wake the loop, `_quiet_until`:

                      wake, for an item                 delivered
        OPEN  ---------------------------> DELIVERING ------------> PAUSED
        (in the past)                      (infinite)               (in the future)
          ^                                    ^                        |
          |                                    |                        |
          |                                    |                        v
          +-------- nothing was put ------- the timer at the end of the pause

    The thread appends an item before it reads the state, and the timer reads the items after the
    pause has ended. So the timer sees every item for which the loop was not woken. An urgent item
    that arrives during a pause is delivered immediately, and the pause continues.

    The thread calls only `put` and `wake`; the event loop calls everything else.
    """

    def __init__(
        self,
        deliver: Callable[[Sequence[Any], bool], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`deliver` takes new items. If its second argument is True, it delivers only the urgent
        items and keeps the other items for the next call with False."""
        self._deliver = deliver
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._items: deque[Any] = deque()
        self._quiet_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._urgent = False  # an item since the last `wake`
        self._postponed = False  # `deliver` may keep items

    def put(self, item: Any, *, urgent: bool) -> None:
        """Add an item, which stays until `wake` wakes the loop to deliver it."""
        self._items.append(item)
        self._urgent |= urgent

    def wake(self) -> None:
        """Wake the loop if there are items. During a pause, wake it only if an item is urgent."""
        urgent, self._urgent = self._urgent, False
        if self._items and time.monotonic() >= self._quiet_until:
            self._quiet_until = math.inf
            self._loop.call_soon_threadsafe(self.deliver)
        elif urgent:
            self._loop.call_soon_threadsafe(self._deliver_urgent)

    def deliver(self) -> None:
        """Deliver every item. Deliveries wake tasks, which run before the next pause between
        deliveries. So the length of the pause also depends on the tasks' processor time."""
        began = time.thread_time()
        self._postponed = False
        try:
            self._deliver(self._taken(), False)
        finally:
            self._loop.call_soon(self._pause, began)

    def _deliver_urgent(self) -> None:
        if time.monotonic() >= self._quiet_until:
            self.deliver()  # the pause has ended meanwhile, and its timer may have fired
        else:
            self._postponed = True
            self._deliver(self._taken(), True)

    def _taken(self) -> list[Any]:
        return [self._items.popleft() for _ in range(len(self._items))]

    def _pause(self, began: float) -> None:
        """Begin a pause. Its length depends only on processor time, not on time spent waiting for
        the interpreter."""
        pause = min(PAUSE_FACTOR * (time.thread_time() - began), MAX_PAUSE)
        self._quiet_until = time.monotonic() + pause
        if self._timer is None:
            self._set_timer(pause)

    def _pause_ended(self) -> None:
        """Deliver the items that arrived during the pause. Without this they might wait forever,
        because the thread may never call `wake` again."""
        self._timer = None
        left = self._quiet_until - time.monotonic()
        if left <= 0:
            if self._items or self._postponed:
                self.deliver()
        elif left < math.inf:  # another delivery has begun another pause
            self._set_timer(left)

    def _set_timer(self, seconds: float) -> None:
        self._timer = self._loop.call_later(max(seconds, MIN_TIMER), self._pause_ended)
