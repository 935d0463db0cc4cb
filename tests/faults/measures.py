"""Sizes of the attacks, and the memory of the server under attack.

Tests of single mechanisms are elsewhere. An attack tests a whole process: its memory, and the
waiting times of other clients.
"""

from hypothesis import settings

from benchmarks.footprint import resident
from tests.e2e.server import ServedProcess
from tests.profiles import THOROUGH


def times(short: int, long: int) -> int:
    """The size of an attack: `long` in hypothesis' profile "thorough", else `short`."""
    return long if settings().max_examples >= THOROUGH else short


def resident_mib(process: ServedProcess) -> float:
    """Resident memory of the server's process in MiB."""
    return resident(process.process.pid) / 2**20
