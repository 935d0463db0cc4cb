"""Heap: returns memory to the operating system after it was freed in many small pieces.

glibc keeps freed memory, such as that of lexers, if it is between pieces that are still in use.
This module does nothing on systems without `malloc_trim` or `/proc`.
"""

import ctypes
import resource
from pathlib import Path

TRIM_BYTES = 2**25
"""Growth of the process, in bytes, that triggers a trim. A trim takes about 0.1 s per GiB."""
ENDS = 64
"""Number of lexers that are freed between two checks of the process size, while other lexers
are in use."""


class Heap:
    """Counts the lexers in use, to decide when to trim. Only the thread that generates tokens may
    use this object."""

    def __init__(self) -> None:
        self._in_use = self._ended = 0
        self._before = resident()  # at the start, or when last trimmed with no lexer in use

    def begin(self) -> None:
        self._in_use += 1

    def end(self) -> None:
        """Record that a lexer was freed; trim if the process has grown by TRIM_BYTES."""
        self._in_use -= 1
        self._ended += 1
        if self._in_use and self._ended < ENDS:
            return
        self._ended = 0
        if resident() - self._before > TRIM_BYTES:
            release_memory()
            if not self._in_use:
                self._before = resident()


def release_memory() -> None:
    """Return all freed memory of this process to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident() -> int:
    """Resident bytes of this process; 0 if the system does not report them."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * resource.getpagesize()
