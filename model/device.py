"""Device, dtype and threads: where and in which dtype a model runs on this machine.

Turns the words of a command line ("auto", "cpu", "cuda:1", "bfloat16", 0 threads) into torch's
objects, or rejects them with the reason; and says what the processor can do. Does not move anything
there, and does not know what the dtype "auto" is: that depends on what decodes
(`model/inference/kernels/select.py`).
"""

import ctypes
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from model.dtypes import FloatName

BFLOAT16_INSTRUCTIONS = {
    "amx_bf16": "AMX-BF16",
    "avx512_bf16": "AVX-512 BF16",
    "bf16": "Arm BF16",
}
"""Features of processors that have dot products of bfloat16, with their names for people."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
KEPT_BYTES = 32 * 2**20
"""Freed memory up to this size is reused instead of returned: the largest that the C library
allows, and larger than what a step computes with."""
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux says how much memory a container may have."""


class DeviceError(ValueError):
    """A device that this machine does not offer."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model lives and in which dtype it computes."""

    device: torch.device
    dtype: torch.dtype
    threads: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_placement(
    device: str = "auto", dtype: FloatName = "float32", threads: int = 0
) -> Placement:
    """Resolve "auto", which is CUDA when there is one, and 0 threads, which are as many as the
    process has processors."""
    return Placement(
        choose_device(device), getattr(torch, dtype), threads or available_processors()
    )


def choose_device(name: str) -> torch.device:
    """The device of a name, "auto" being CUDA when there is one. Raises DeviceError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"{name!r} is not a device; try auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device {name!r} is not supported; cpu and cuda are")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise DeviceError(f"device {name!r} was asked for, but torch finds no CUDA device here")
        if (device.index or 0) >= count:
            raise DeviceError(f"device {name!r} was asked for, but there are {count} CUDA devices")
    return device


def use_threads(threads: int) -> None:
    """Set the size of torch's compute pool for this process."""
    torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Let this process take again what it freed, instead of giving it back to the system and paying
    for each page of it once more: measured, half the time of a prefill of a model of 30 million
    parameters. Does nothing where the C library is not GNU's."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, KEPT_BYTES)
        set_option(M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device, without waiting for what the device has yet to do."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def disable_cudnn_attention() -> None:
    """Keep torch from attention by cuDNN in this process: from 2.11 on it is the first choice on
    Hopper, and plans anew, for tens of milliseconds, whenever a prompt or a step has a length that
    never was before. For serving; a training step has one shape. Does nothing without CUDA."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch's compute pool out of a block: for small work beside threads of our own, where two
    pools that wait for each other cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def available_processors() -> int:
    """Processors this process may run on (a container's or taskset's share, not the machine's)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory(limits: tuple[Path, ...] = CONTAINER_LIMITS) -> int:
    """Bytes of memory that this process may come to have: the machine's, or the container's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        try:
            limit = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdecimal():  # else "max": there is no limit
            total = min(total, int(limit))
    return total


def processor_features() -> frozenset[str]:
    """What the processor can do, in Linux's words; nothing where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def bfloat16_instructions(features: Collection[str]) -> str | None:
    """What a processor of these features multiplies bfloat16 with, or None."""
    return next(
        (name for feature, name in BFLOAT16_INSTRUCTIONS.items() if feature in features), None
    )


def describe(device: torch.device) -> str:
    """The device for a person: "cuda:0 (NVIDIA H200)" or "cpu (AVX512)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    return str(device)
