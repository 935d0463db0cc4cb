"""Signals: let Ctrl-C stop a run after the current step instead of in the middle of it.

In a `StopSignals` context the first SIGINT or SIGTERM only sets a flag, so that the step can
finish; the second one raises KeyboardInterrupt. (Clusters send SIGTERM before they take a machine
away.) Outside the main thread, signals cannot be caught, and the context has no effect.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopSignals:
    """A context manager. `asked` becomes True at the first signal."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.asked = False
        self._on_first = on_first
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._on_first()


@contextmanager
def errors_outlive_sigterm(kind: type[Exception]) -> Iterator[None]:
    """Ignore SIGTERM while the process handles an error of this kind, so that its message is
    printed. When one process of a run ends, torchrun immediately sends SIGTERM to all others, while
    they are still handling the lost connection. Otherwise the previous handler runs; if there is
    none, the process ends."""

    def terminate(number: int, frame: FrameType | None) -> None:
        if isinstance(sys.exc_info()[1], kind):
            return
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
