"""Interrupts: makes Ctrl-C during imports end the process without a traceback.

Importing takes seconds. This module is imported first, so it imports only the standard library.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of an interrupted command, as in shells."""


@contextmanager
def quits_when_interrupted() -> Iterator[None]:
    """End the process immediately, without cleanup, if it is interrupted in this context. If nohup
    or a test has set an interrupt handler, that handler stays in place."""
    usual = signal.default_int_handler
    replaced = signal.getsignal(signal.SIGINT) is usual
    if replaced:
        try:
            signal.signal(signal.SIGINT, _quit)
        except ValueError:  # not in the main thread, the only one with signals
            replaced = False
    try:
        yield
    finally:
        if replaced:
            signal.signal(signal.SIGINT, usual)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
