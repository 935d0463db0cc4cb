"""Interrupts: makes Ctrl-C during imports end the process without a traceback, and SIGTERM end it
after removing unfinished files.

Importing takes seconds. This module is imported first, so it imports only the standard library.
"""

import os
import signal
import sys
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


@contextmanager
def cleans_up_when_terminated() -> Iterator[None]:
    """In this context, SIGTERM raises SystemExit, so that unfinished files are removed. A command
    may set another handler."""
    process = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a fork, which must not remove this process's files
            os._exit(128 + number)
        sys.exit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not in the main thread, the only one with signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
