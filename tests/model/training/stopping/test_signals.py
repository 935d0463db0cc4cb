"""Ctrl-C, and SIGTERM as a cluster sends it."""

import os
import signal

import pytest

from model.training.stopping.signals import StopSignals


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_the_second_stops(first: int, second: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    told: list[str] = []
    with StopSignals(lambda: told.append("stopping")) as signals:
        os.kill(os.getpid(), first)
        assert signals.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
    assert told == ["stopping"]
    assert signal.getsignal(signal.SIGTERM) is before
