"""Machine: the best rates of this machine at reading memory and at multiplying.

Both are measured by stock operations with the threads and on the device of the model. Neighbours on
the same hardware reduce both by amounts that change from minute to minute.
"""

import math
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from logitd.model.device import Placement, describe

READ_BYTES = {"cpu": 2**29, "cuda": 2**31}
"""Bytes to read: several times the caches, and little enough for a machine that has room for a
model. More on a GPU, because the read has to take much longer than the launch."""
MATRIX_WIDTH = {"cpu": 2048, "cuda": 8192}
"""Width of the square matrices. Reading them takes much less time than multiplying them."""
REPEATS = 8
WAKING_SECONDS = {"cpu": 0.0, "cuda": 0.5}
"""Least time of a measurement: an idle GPU raises its clock gradually."""
ENOUGH_SECONDS = 4.0
"""Time after which a measurement stops: a machine without instructions for a dtype is very slow."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes read per second, and operations of matrix products per second. A multiplication and an
    addition are two operations."""

    read_bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Conditions of a measurement. `device`, `dtype` and `threads` have the words of /info."""

    processor: str
    device: str
    dtype: str
    threads: int
    torch: str
    python: str


def measure_machine(
    placement: Placement, *, nbytes: int | None = None, width: int | None = None
) -> Machine:
    """Measure both rates in a few seconds with torch's present number of threads. `nbytes` and
    `width` replace the sizes of the device."""
    return Machine(
        read_bandwidth=read_bandwidth(placement.device, nbytes),
        matrix_rate=matrix_rate(placement.device, placement.dtype, width),
    )


@torch.inference_mode()
def read_bandwidth(device: torch.device, nbytes: int | None = None) -> float:
    """Bytes per second of a sum over memory, the best of several runs."""
    nbytes = nbytes or READ_BYTES[device.type]
    numbers = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    return numbers.nbytes / _quickest(numbers.sum, device)


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: torch.dtype, width: int | None = None) -> float:
    """Operations per second of a product of two square matrices, the best of several runs."""
    width = width or MATRIX_WIDTH[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.rand(width, width, generator=generator, device=device).to(dtype) for _ in range(2)
    )
    product = torch.empty_like(left)
    seconds = _quickest(lambda: torch.matmul(left, right, out=product), device)
    return 2 * width**3 / seconds


def surroundings(placement: Placement) -> Surroundings:
    return Surroundings(
        processor=processor_name(),
        device=describe(placement.device),
        dtype=placement.dtype_name,
        threads=placement.threads,
        torch=str(torch.__version__),
        python=platform.python_version(),
    )


def processor_name() -> str:
    """The processor's own name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    line = re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE)
    return line[1].strip() if line else platform.processor() or platform.machine()


def _quickest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of several runs."""
    quickest, start = math.inf, time.perf_counter()
    awake, end = start + WAKING_SECONDS[device.type], start + ENOUGH_SECONDS
    repeats = 0
    while repeats < REPEATS or time.perf_counter() < awake:
        repeats += 1
        began = time.perf_counter()
        run()
        if device.type == "cuda":  # a call only queues the work
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        quickest = min(quickest, ended - began)
        if ended > end:
            break
    return quickest
