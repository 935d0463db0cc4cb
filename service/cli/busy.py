"""Busy: a notice that other programs are using this machine's processors. Imports only the standard
library."""

import os
import time
from pathlib import Path

LOAD = Path("/proc/loadavg")
SAMPLES, INTERVAL = 5, 0.01
"""How many times the number of runnable threads is read, and the interval between two readings in
seconds."""


def busy_notice(file: Path = LOAD) -> str | None:
    """The notice if other programs use at least one processor and at least a quarter of all
    processors, both now and on average over the last minute. None otherwise, or if `file` does not
    exist, as on systems other than Linux.

    Both values are checked, because the average includes commands that have just ended, and the
    current value may be a short peak.
    """
    processors = os.cpu_count() or 1
    others = []
    try:
        for _ in range(SAMPLES):
            average, _, _, threads, _ = file.read_text(encoding="ascii").split()
            others.append(int(threads.partition("/")[0]) - 1)  # except this one
            time.sleep(INTERVAL)
    except (OSError, ValueError):
        return None
    load = float(average)
    if min(load, sum(others) / SAMPLES) < max(0.9, processors / 4):
        return None
    return f"this machine is busy (load {load:.1f} on {processors} cores), so speeds are lower"
