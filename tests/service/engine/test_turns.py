"""Several engines in one thread: in turn, each as it would compute alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from logitd.service.engine.turns import StepThread


@contextmanager
def steps() -> Iterator[StepThread]:
    thread = StepThread()
    try:
        yield thread
    finally:
        thread.close()


def test_all_is_done_in_one_thread_and_one_thing_at_a_time() -> None:
    names, inside, most = set(), 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        names.add(threading.current_thread())
        inside -= 1

    with steps() as thread:
        callers = [
            threading.Thread(target=lambda: [thread.call(work) for _ in range(200)])
            for _ in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert most == 1
    assert len(names) == 1
    assert names.isdisjoint(callers)


def test_who_has_waited_is_next() -> None:
    """While one computes, two others wait; the one that computes comes again behind them."""
    order: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait()
        order.append("first")

    with steps() as thread:

        def first() -> None:
            thread.call(hold)
            thread.call(lambda: order.append("first again"))

        callers = [threading.Thread(target=first)]
        callers[0].start()
        begun.wait()
        for name in ("second", "third"):
            size = thread._work.qsize()
            caller = threading.Thread(target=thread.call, args=(lambda n=name: order.append(n),))
            caller.start()
            callers.append(caller)
            while thread._work.qsize() == size:
                pass
        go.set()
        for caller in callers:
            caller.join()
    assert order == ["first", "second", "third", "first again"]


def test_what_is_raised_is_raised_to_who_asked_and_others_go_on() -> None:
    def broken() -> None:
        raise KeyError("of this one")

    with steps() as thread:
        with pytest.raises(KeyError, match="of this one"):
            thread.call(broken)
        assert thread.call(lambda: 5) == 5


def test_its_thread_ends() -> None:
    with steps() as thread:
        named = thread.call(threading.current_thread)
        assert named.daemon
    named.join(10)
    assert not named.is_alive()
