"""Device, dtype and threads: where and in which dtype a model runs on this machine.

Turns the words of a command line ("auto", "cpu", "cuda:1", "bfloat16", 0 threads) into torch's
objects, or rejects them with the reason. Does not move anything there, and does not know what the
dtype "auto" is: that depends on what decodes (`model/inference/kernels/select.py`).
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from logitd.model.dtypes import FloatName

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
KEPT_BYTES = 32 * 2**20
"""Freed memory up to this size is reused instead of returned: the largest that the C library
allows, and larger than what a step computes with."""
MEMINFO = Path("/proc/meminfo")
CARDS_RUN: tuple[str, ...] = ()
"""Names of GPUs, as torch has them, on which `python -m benchmarks.gpu` ran to its end."""
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Where Linux says in which control groups this process is, and where these are."""


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
    process has processors. Raises DeviceError for more: they would wait for each other at every
    operation, for a processor's share of time each."""
    processors = available_processors()
    if not 0 <= threads <= processors:
        plural = "" if processors == 1 else "s"
        raise DeviceError(
            f"threads is {threads}, and this process has {processors} processor{plural}: give 1 to "
            f"{processors}, or 0 for all of them"
        )
    return Placement(choose_device(device), getattr(torch, dtype), threads or processors)


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


def available_processors(groups: Sequence[Path] | None = None) -> int:
    """Processors this process may run on (a container's or taskset's share, not the machine's).
    Where a control group limits its time, as many as that is worth, rounded up. `groups` are the
    folders of the control groups that may."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    if groups is None:
        groups = (*memory_groups(), GROUPS / "cpu", GROUPS / "cpu,cpuacct")
    limits = map(_group_processors, groups)
    return max(1, min([count, *(limit for limit in limits if limit is not None)]))


def machine_memory(groups: Sequence[Path] | None = None) -> int:
    """Bytes of memory that this process may come to have: the machine's, or the container's.
    `groups` are the folders of the control groups that limit it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = map(_group_limit, memory_groups() if groups is None else groups)
    return min([total, *(limit for limit in limits if limit is not None)])


def free_memory(groups: Sequence[Path] | None = None, meminfo: Path = MEMINFO) -> int:
    """Bytes of memory that this process can take now without swapping: what Linux calls available,
    or what is left to the container. Files that were read do not count as taken."""
    groups = memory_groups() if groups is None else groups
    free = [machine_memory(groups)]
    if (available := _field(meminfo, "MemAvailable:")) is not None:
        free.append(1024 * available)
    for group in groups:
        limit, used = _group_limit(group), _group_use(group)
        if limit is not None and used is not None:
            free.append(limit - used)
    return max(0, min(free))


def memory_groups(own: Path = OWN_GROUPS, root: Path = GROUPS) -> tuple[Path, ...]:
    """The folders of the control groups that may limit this process: its own and those above it,
    in either version. In a container they may have other names, and then the root is its own."""
    folders = [root, root / "memory"]
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        top = root if not controllers else root / "memory"
        if not controllers or "memory" in controllers.split(","):
            inner = top / name.lstrip("/")
            folders += [inner, *(above for above in inner.parents if top in above.parents)]
    return tuple(dict.fromkeys(folders))


def _group_limit(group: Path) -> int | None:
    """Bytes that a control group may have, None where it may have all."""
    limits = [_number(group / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((limit for limit in limits if limit is not None), default=None)


def _group_processors(group: Path) -> int | None:
    """Processors' worth of time that a control group may have, None where it may have all."""
    try:
        words = (group / "cpu.max").read_text(encoding="ascii").split()
        quota, period = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):  # no such file, or "max"
        first, second = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if first is None or not second:
            return None
        quota, period = first, second
    return -(-quota // period)


def _group_use(group: Path) -> int | None:
    """Bytes that a control group cannot do without; None where it does not say."""
    current, usage = _number(group / "memory.current"), _number(group / "memory.usage_in_bytes")
    used, prefix = (current, "") if current is not None else (usage, "total_")
    if used is None:
        return None
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    return used - sum(_field(group / "memory.stat", name) or 0 for name in names)


def _number(path: Path) -> int | None:
    """The number that is all of a file's text; None for "max", and where there is no such file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    """The number behind a name at the beginning of a line; None where there is none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    words = (line.split() for line in lines)
    return next((int(word[1]) for word in words if len(word) > 1 and word[0] == name), None)


def unproven(device: str) -> str | None:
    """That nothing here was ever run on this kind of GPU, for a person; None of a CPU, and of
    CARDS_RUN. `device` is as `describe` has it."""
    if not device.startswith("cuda") or any(card in device for card in CARDS_RUN):
        return None
    return (
        "this code was never run on such a card; what it computes there is held against the CPU by "
        "`python -m benchmarks.gpu`"
    )


def describe(device: torch.device) -> str:
    """The device for a person: "cuda:0 (NVIDIA H200)" or "cpu (AVX512)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    return str(device)
