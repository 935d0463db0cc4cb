"""Machine: what this machine could do at best. How fast it reads memory, how fast it multiplies.

Both are measured with the threads and on the device that the model gets, by stock operations that
do nothing else. Neighbours on the same hardware take from both, and from one minute to the next
not alike.
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
"""Several times what is kept in caches, so that memory is read; and little enough for a machine
that has room for a model. More on a GPU, where reading it has to take much longer than to start."""
MATRIX_WIDTH = {"cpu": 2048, "cuda": 8192}
"""Of square matrices: so wide that their memory is read much faster than they are multiplied."""
REPEATS = 8
WAKING_SECONDS = {"cpu": 0.0, "cuda": 0.5}
"""How long it is measured at least: a GPU that had nothing to do comes to its clock by and by."""
ENOUGH_SECONDS = 4.0
"""Some machines have no instructions for a dtype and multiply in it very slowly."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes that are read and operations of matrix products (a multiplication and an addition are
    two), each per second."""

    read_bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else a figure depends on. `device`, `dtype` and `threads` as the server's /info says
    them."""

    processor: str
    device: str
    dtype: str
    threads: int
    torch: str
    python: str


def measure_machine(
    placement: Placement, *, nbytes: int | None = None, width: int | None = None
) -> Machine:
    """A few seconds; torch has been told its threads before. `nbytes`, `width`: of what is read and
    multiplied, where less than is right for the device will do."""
    return Machine(
        read_bandwidth=read_bandwidth(placement.device, nbytes),
        matrix_rate=matrix_rate(placement.device, placement.dtype, width),
    )


@torch.inference_mode()
def read_bandwidth(device: torch.device, nbytes: int | None = None) -> float:
    """Bytes per second of a sum over memory, the best of some."""
    nbytes = nbytes or READ_BYTES[device.type]
    numbers = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    return numbers.nbytes / _quickest(numbers.sum, device)


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: torch.dtype, width: int | None = None) -> float:
    """Operations per second of a product of two square matrices, the best of some."""
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
    """What the processor calls itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    line = re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE)
    return line[1].strip() if line else platform.processor() or platform.machine()


def _quickest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of some runs."""
    quickest, start = math.inf, time.perf_counter()
    awake, end = start + WAKING_SECONDS[device.type], start + ENOUGH_SECONDS
    repeats = 0
    while repeats < REPEATS or time.perf_counter() < awake:
        repeats += 1
        began = time.perf_counter()
        run()
        if device.type == "cuda":  # there a call only queues the work
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        quickest = min(quickest, ended - began)
        if ended > end:
            break
    return quickest
