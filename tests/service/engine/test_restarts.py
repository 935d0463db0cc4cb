"""Restarts: within a number, after pauses that grow, and not while the server ends."""

import threading
import time
from typing import cast

import pytest

from logitd.service.engine import restarts as module
from logitd.service.engine.driver import EngineDriver, EngineLost
from logitd.service.engine.restarts import WINDOW, Restarts

DRIVER = cast(EngineDriver, object())


class Clock:
    """Says what it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Made:
    """Gives drivers, and fails as often as told before."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.at: list[float] = []

    def __call__(self) -> EngineDriver:
        self.at.append(time.monotonic())
        if self.failures:
            self.failures -= 1
            raise EngineLost("no memory")
        return DRIVER


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.1)


def test_so_many_within_a_window() -> None:
    clock, made = Clock(), Made()
    restarts = Restarts(made, 2, clock)
    assert restarts.another() is DRIVER
    clock.now = WINDOW - 1
    assert restarts.another() is DRIVER
    with pytest.raises(EngineLost, match=r"started again 2 times .* --engine-restarts allows 2"):
        restarts.another()
    clock.now = WINDOW + 1  # the first one no longer counts
    assert restarts.another() is DRIVER
    with pytest.raises(EngineLost):
        restarts.another()


def test_pauses_grow_up_to_the_longest(logged_errors: list[str]) -> None:
    made = Made(failures=4)
    before = time.monotonic()
    assert Restarts(made, 5).another() is DRIVER
    gaps = [after - at for at, after in zip([before, *made.at], made.at, strict=False)]
    assert gaps[0] < 0.05
    assert all(gap >= least for gap, least in zip(gaps[1:], [0.05, 0.1, 0.1, 0.1], strict=True))
    assert len(logged_errors) == 4
    logged_errors.clear()


def test_what_fails_at_the_start_counts(logged_errors: list[str]) -> None:
    made = Made(failures=9)
    with pytest.raises(EngineLost, match="allows 3"):
        Restarts(made, 3).another()
    assert len(made.at) == len(logged_errors) == 3
    logged_errors.clear()


def test_a_server_that_ends_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 60.0)
    restarts = Restarts(Made(), 9)
    assert restarts.another() is DRIVER
    threading.Timer(0.05, restarts.leave).start()
    began = time.monotonic()
    assert restarts.another() is None
    assert time.monotonic() - began < 30
