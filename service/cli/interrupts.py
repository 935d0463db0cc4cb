"""Interrupts: Ctrl-C while nothing but imports has happened ends the process in silence.

Importing takes seconds, and an interrupt in the middle of it would come out as some extension's
traceback. Standard library alone, so that it stands before everything else is imported.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of what was interrupted, as shells count."""


@contextmanager
def quits_when_interrupted() -> Iterator[None]:
    """While modules are imported, and nothing is there to be cleaned up: an interrupt ends the
    process at once. Leaves alone what somebody has decided on interrupts (nohup, a test)."""
    usual = signal.default_int_handler
    replaced = signal.getsignal(signal.SIGINT) is usual
    if replaced:
        try:
            signal.signal(signal.SIGINT, _quit)
        except ValueError:  # not in the main thread, which is the one that is interrupted
            replaced = False
    try:
        yield
    finally:
        if replaced:
            signal.signal(signal.SIGINT, usual)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
