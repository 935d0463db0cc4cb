"""Interrupts: makes Ctrl-C and SIGTERM during imports end the process immediately. After the
imports, SIGTERM ends it after removing unfinished files. Postpones SIGHUP while a server starts.

Importing takes seconds. This module is imported first, so it imports only the standard library.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of an interrupted command, as in shells."""


@contextmanager
def quits_when_interrupted() -> Iterator[None]:
    """End the process immediately, without cleanup, if it is interrupted or terminated in this
    context. An exception could be caught by a library that is being imported, or crash its native
    code. If nohup or a test has set an interrupt handler, that handler stays in place. So does an
    ignored SIGTERM."""
    usual: dict[int, Any] = {}
    with suppress(ValueError):  # not in the main thread, the only one with signals
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            usual[signal.SIGINT] = signal.signal(signal.SIGINT, _quit)
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, None):  # None: set by C
            usual[signal.SIGTERM] = signal.signal(signal.SIGTERM, _quit)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def postpone_hangups() -> None:
    """Block SIGHUP, in this thread and those that it starts. A server unblocks it when it can
    handle it. Until then it would end the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


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
    os._exit(128 + number)
