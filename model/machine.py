"""Machine: the peak rates at which this machine reads memory and multiplies matrices.

Both rates are measured with ordinary torch operations, on the model's device and with its threads.
Other users of the same hardware reduce them by amounts that change from minute to minute.
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
"""Number of bytes to read: several times the size of the caches, but small enough for any machine
that has room for a model. GPUs read more, so that reading takes much longer than launching the
kernel."""
MATRIX_WIDTH = {"cpu": 2048, "cuda": 8192}
"""Width of the square matrices. Reading them takes much less time than multiplying them."""
REPEATS = 8
WAKING_SECONDS = {"cpu": 0.0, "cuda": 0.5}
"""Minimum duration of a measurement: an idle GPU raises its clock gradually."""
ENOUGH_SECONDS = 4.0
"""A measurement ends after this time, even with fewer than REPEATS runs, because a machine without
instructions for the dtype is very slow."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes read per second, and floating-point operations per second in matrix products. A
    multiplication and an addition are two operations."""

    read_bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Conditions of a measurement. `device`, `dtype` and `threads` are as in /info."""

    processor: str
    device: str
    dtype: str
    threads: int
    torch: str
    python: str


def measure_machine(
    placement: Placement, *, nbytes: int | None = None, width: int | None = None
) -> Machine:
    """Measure both rates in a few seconds with torch's current number of threads. `nbytes` and
    `width` replace READ_BYTES and MATRIX_WIDTH."""
    return Machine(
        read_bandwidth=read_bandwidth(placement.device, nbytes),
        matrix_rate=matrix_rate(placement.device, placement.dtype, width),
    )


@torch.inference_mode()
def read_bandwidth(device: torch.device, nbytes: int | None = None) -> float:
    """The number of bytes read per second while summing a large tensor, in the best of several
    runs."""
    nbytes = nbytes or READ_BYTES[device.type]
    numbers = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    return numbers.nbytes / _quickest(numbers.sum, device)


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: torch.dtype, width: int | None = None) -> float:
    """The number of operations per second in a product of two square matrices, in the best of
    several runs."""
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
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    line = re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE)
    return line[1].strip() if line else platform.processor() or platform.machine()


def _quickest(run: Callable[[], object], device: torch.device) -> float:
    """Duration in seconds of the quickest of several runs."""
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
