"""WakeupThrottle: wake-ups on a simulated loop and clocks, and no lost item between two real
threads."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from logitd.service.engine.wakeup import MAX_PAUSE, MIN_TIMER, PAUSE_FACTOR, WakeupThrottle
from tests.service.serving import TEST_TIMEOUT


class Timer:
    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback = callback


class Loop:
    """An event loop and clocks that the test controls."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cpu = 0.0
        self.woken: list[Callable[[], None]] = []  # wake-ups by the thread
        self.soon: list[Callable[[], None]] = []
        self.timers: list[Timer] = []

    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        self.woken.append(lambda: callback(*args))

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        self.soon.append(lambda: callback(*args))

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay, callback)
        self.timers.append(timer)
        return timer

    def run(self) -> None:
        """Run everything that is due."""
        while self.woken or self.soon or any(t.due <= self.now for t in self.timers):
            ready = self.woken or self.soon
            if ready:
                ready.pop(0)()
                continue
            due = min(self.timers, key=lambda timer: timer.due)
            self.timers.remove(due)
            due.callback()


class Bench:
    """A throttle whose deliveries each take `cost` seconds of processor time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = Loop()
        self.cost = 0.001
        self.delivered: list[int] = []
        self.postponed: list[int] = []
        self.urgent: set[int] = set()
        monkeypatch.setattr("logitd.service.engine.wakeup.time.monotonic", lambda: self.loop.now)
        monkeypatch.setattr("logitd.service.engine.wakeup.time.thread_time", lambda: self.loop.cpu)
        self.throttle = WakeupThrottle(self._deliver, self.loop)  # type: ignore[arg-type]

    def _deliver(self, items: Sequence[int], only_urgent: bool) -> None:
        every = [*self.postponed, *items]
        due = [item for item in every if item in self.urgent or not only_urgent]
        self.postponed = [item for item in every if item not in due]
        self.delivered += due
        self.loop.cpu += self.cost * len(due)
        self.loop.now += self.cost * len(due)

    def put(self, item: int, *, urgent: bool = False) -> bool:
        """Put an item and call `wake`. Returns True if the loop was woken."""
        if urgent:
            self.urgent.add(item)
        self.throttle.put(item, urgent=urgent)
        self.throttle.wake()
        return bool(self.loop.woken)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_wake_delivers_items_of_the_thread(bench: Bench) -> None:
    """`put` alone does not wake the loop. If it did, the loop would occupy the interpreter while
    the thread is still preparing its next step."""
    bench.throttle.put(1, urgent=True)
    assert not bench.loop.woken
    bench.throttle.wake()
    bench.put(2)
    assert len(bench.loop.woken) == 1, "one wake-up for both"
    bench.loop.run()
    assert bench.delivered == [1, 2]
    bench.throttle.wake()
    assert not bench.loop.woken, "there is nothing to deliver"


def test_pause_is_a_multiple_of_the_delivery(bench: Bench) -> None:
    """Items that arrive during the pause are delivered at its end, even if no other item
    follows."""
    bench.put(1)
    bench.loop.run()
    end = bench.loop.now + PAUSE_FACTOR * bench.cost
    assert not bench.put(2)
    assert not bench.put(3)
    bench.loop.now = end - 1e-6
    bench.loop.run()
    assert bench.delivered == [1]
    bench.loop.now = end + 1e-6
    bench.loop.run()
    assert bench.delivered == [1, 2, 3]
    bench.loop.now += 2 * PAUSE_FACTOR * bench.cost + 1e-6
    assert bench.put(4), "the pause is over"


def test_urgent_item_does_not_wait_for_the_end_of_a_pause(bench: Bench) -> None:
    """The other items still wait until the pause ends."""
    bench.put(1)
    bench.loop.run()
    end = bench.loop.now + PAUSE_FACTOR * bench.cost
    assert not bench.put(2)
    assert bench.put(3, urgent=True)
    bench.loop.run()
    assert bench.delivered == [1, 3]
    assert not bench.put(4), "the pause continues"
    bench.loop.now = end + 1e-6
    bench.loop.run()
    assert bench.delivered == [1, 3, 2, 4]


def test_urgent_wakeup_that_comes_after_the_pause_delivers_all(bench: Bench) -> None:
    """The timer of the pause may have fired before the items came, so this wake-up must deliver all
    of them."""
    bench.put(1)
    bench.loop.run()
    bench.put(2, urgent=True)
    bench.throttle.put(3, urgent=False)
    bench.loop.now += PAUSE_FACTOR * bench.cost + 1e-6
    bench.loop.run()
    assert bench.delivered == [1, 2, 3]


def test_pause_has_an_upper_bound(bench: Bench) -> None:
    bench.cost = 10.0
    bench.put(1)
    bench.loop.run()
    bench.put(2)
    bench.loop.now += MAX_PAUSE + 1e-6
    bench.loop.run()
    assert bench.delivered == [1, 2]


def test_pause_ignores_waiting_for_the_interpreter(bench: Bench) -> None:
    """The delivery takes a long time by the clock, but no processor time."""
    bench.cost = 0.0
    bench.put(1)
    bench.loop.now += 5
    bench.loop.run()
    assert bench.put(2)


def test_pause_counts_the_tasks_that_a_delivery_wakes(bench: Bench) -> None:
    """The woken tasks run after the delivery and before the pause."""
    bench.cost = 0.0
    bench.put(1)
    bench.loop.woken.pop()()
    bench.loop.cpu += 0.001  # tasks that were woken
    bench.loop.run()
    assert not bench.put(2)
    bench.loop.now += PAUSE_FACTOR * 0.001
    assert bench.put(3)


def test_one_timer_serves_many_pauses(bench: Bench) -> None:
    bench.put(0)
    bench.loop.run()
    for item in range(1, 20):
        bench.put(item, urgent=True)
        bench.loop.run()
        assert len(bench.loop.timers) == 1
        bench.loop.now += MIN_TIMER / 4
    assert bench.delivered == list(range(20))


def test_failed_delivery_does_not_stop_the_next(bench: Bench) -> None:
    def fail(items: Sequence[int], _: bool) -> None:
        if 1 in items:
            raise ZeroDivisionError
        bench.delivered += items

    bench.throttle = WakeupThrottle(fail, bench.loop)  # type: ignore[arg-type]
    bench.put(1)
    with pytest.raises(ZeroDivisionError):
        bench.loop.run()
    bench.loop.run()
    bench.loop.now += MAX_PAUSE
    assert bench.put(2)
    bench.loop.run()
    assert bench.delivered == [2]


@pytest.mark.parametrize("seed", range(3))
def test_items_of_a_thread_come_once_and_in_order(seed: int) -> None:
    """The last items arrive too, although no other item follows them."""
    count = 2000

    async def test() -> None:
        delivered: list[int] = []
        done = asyncio.Event()

        def deliver(items: Sequence[int], _: bool) -> None:
            delivered.extend(items)
            if len(delivered) == count:
                done.set()

        throttle = WakeupThrottle(deliver)
        rng = random.Random(seed)

        def produce() -> None:
            for item in range(count):
                throttle.put(item, urgent=rng.random() < 0.01)
                if rng.random() < 0.5 or item == count - 1:
                    throttle.wake()
                if rng.random() < 0.05:
                    time.sleep(rng.random() * 0.002)

        thread = threading.Thread(target=produce)
        thread.start()
        await done.wait()
        thread.join()
        assert delivered == list(range(count))

    asyncio.run(asyncio.wait_for(test(), TEST_TIMEOUT))
