"""Ctrl-C, and SIGTERM as a cluster sends it."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from logitd.model.training.stopping.signals import StopSignals, errors_outlive_sigterm
from logitd.service.cli.interrupts import cleans_up_when_terminated


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_the_second_stops(first: int, second: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    told: list[str] = []
    with StopSignals(lambda: told.append("stopping")) as signals:
        os.kill(os.getpid(), first)
        assert signals.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
    assert told == ["stopping"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_error_in_flight_is_printed_before_sigterm_ends_the_process() -> None:
    """torchrun ends the other processes of a run when one has died. A process that was raising an
    error because of the dead process once ended without printing the error."""
    before = signal.getsignal(signal.SIGTERM)
    said = []
    with errors_outlive_sigterm(KeyError):
        try:
            try:
                raise KeyError("the peer is lost")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
        except KeyError as error:
            os.kill(os.getpid(), signal.SIGTERM)
            said.append(error.args[0])
    assert said == ["the peer is lost"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("handling", [False, True])
def test_sigterm_ends_the_process_without_such_an_error(handling: bool) -> None:
    """The process may be handling another error, such as a failed download, when the signal
    comes."""
    code = """
        import os, signal
        from logitd.model.training.stopping.signals import errors_outlive_sigterm
        with errors_outlive_sigterm(KeyError):
            try:
                if HANDLING:
                    raise OSError
            except OSError:
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            print("still here")
    """.replace("HANDLING", str(handling))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, b"")


def test_sigterm_runs_the_previous_handler() -> None:
    """The command line's handler removes unfinished files. SIGTERM once left a run whose text was
    being tokenized, so that the same command was refused afterwards."""
    with cleans_up_when_terminated(), pytest.raises(SystemExit), errors_outlive_sigterm(KeyError):
        os.kill(os.getpid(), signal.SIGTERM)
