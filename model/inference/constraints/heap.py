"""Memory that lexers leave behind, given back to the system.

Lexers grow in small pieces, and glibc keeps those that are freed between others. Knows the size of
the process and `malloc_trim`; on systems without either it does nothing.
"""

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path

TRIM_BYTES = 2**25
"""Growth of the process that is worth a trim, of some 0.1 s a GiB."""
ENDS = 64
"""Lexers that end before the size is looked at while others are in use."""


class Heap:
    """Lexers in use, counted by the thread that generates."""

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._in_use = self._ended = 0
        self._before = resident()  # or when it was last trimmed with no lexer in use

    def begin(self) -> None:
        """Count a lexer that is used."""
        self._in_use += 1

    def end(self) -> None:
        """Count a lexer that was freed; trim if the process has grown much."""
        self._in_use -= 1
        self._ended += 1
        if self._in_use and self._ended < ENDS:
            return
        self._ended = 0
        if self._trim is not None and resident() - self._before > TRIM_BYTES:
            self._trim(0)
            if not self._in_use:
                self._before = resident()


def resident() -> int:
    """Bytes of this process in memory; 0 if the system does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * resource.getpagesize()
