"""Sizes of the attacks and the memory of the server that they attack.

What one mechanism does is tested beside that mechanism. An attack tries what only a whole process
shows: its memory, and what its other clients wait.
"""

from pathlib import Path

from hypothesis import settings

from tests.e2e.server import ServedProcess
from tests.profiles import THOROUGH


def times(short: int, long: int) -> int:
    """Number of tries: `long` in hypothesis' profile "thorough", else `short`."""
    return long if settings().max_examples >= THOROUGH else short


def resident_mib(process: ServedProcess) -> float:
    """Memory of the server's process that is in use, as the kernel counts it."""
    status = Path(f"/proc/{process.process.pid}/status").read_text(encoding="ascii")
    kib = next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]
    return int(kib) / 1024
