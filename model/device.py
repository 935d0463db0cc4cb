"""The device, dtype and threads of a model on this machine, and the memory and processors that this
process may use.

Command-line values ("auto", "cpu", "cuda:1", "bfloat16", 0 threads) are converted to torch's
objects, or refused with the reason. The meaning of the dtype "auto" depends on the decoder
(`model/inference/kernels/select.py`).
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from logitd.model.dtypes import FloatName
from logitd.model.plural import pluralize

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of mallopt(3)."""
KEPT_BYTES = 32 * 2**20
"""The C library keeps freed blocks up to this size for reuse. This is the largest value that it
accepts, and more than a step needs."""
MEMINFO = Path("/proc/meminfo")
CARDS_RUN = ("NVIDIA H200",)
"""The GPUs on which `python -m benchmarks.gpu` has passed, as torch names them."""
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""The file that lists the control groups of this process, and the folder of all groups."""


class DeviceError(ValueError):
    """Raised if this machine does not have the requested device, memory or threads."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The device, the dtype and the number of threads of a model."""

    device: torch.device
    dtype: torch.dtype
    threads: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_placement(
    device: str = "auto", dtype: FloatName = "float32", threads: int = 0
) -> Placement:
    """Resolve the device "auto" (CUDA if available) and 0 threads (one thread for each processor
    that this process may use). Raises DeviceError if there are more threads than processors,
    because the threads would then wait for each other at every operation, or if the process has
    lost its threads in a fork."""
    refuse_lost_threads()
    processors = available_processors()
    if not 0 <= threads <= processors:
        raise DeviceError(
            f"threads is {threads}, but this process has {pluralize(processors, 'processor')}: "
            f"set it to a number from 1 to {processors}, or to 0 to use all of them"
        )
    return Placement(choose_device(device), getattr(torch, dtype), threads or processors)


def choose_device(name: str) -> torch.device:
    """The device with this name; "auto" prefers CUDA. Raises DeviceError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"{name!r} is not a device; try auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device {name!r} is not supported; use cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise DeviceError(
                f"device is {name!r}, but torch finds no CUDA device here; leave it out, or use cpu"
            )
        if (device.index or 0) >= count:
            raise DeviceError(
                f"device is {name!r}, but this machine has only {pluralize(count, 'CUDA device')}"
            )
    return device


def use_threads(threads: int) -> None:
    """Set the size of torch's compute pool for this process."""
    torch.set_num_threads(threads)
    _POOL.largest = max(_POOL.largest, threads)


def refuse_lost_threads() -> None:
    """Raise DeviceError in a fork of a process that computed with several threads. The fork lacks
    these threads, so torch would wait for them forever."""
    if _POOL.lost:
        raise DeviceError(
            f"this process was forked from one that computes with {_POOL.largest} threads, which a "
            "fork does not copy, so a computation would never end: set threads to 1 before the "
            "fork, or start the process with multiprocessing's method 'spawn' or 'forkserver'"
        )


@dataclass
class _Pool:
    """The largest number of threads set in this process, and whether a fork has lost them."""

    largest: int = 1
    lost: bool = False


_POOL = _Pool()


def _after_fork() -> None:
    _POOL.lost = _POOL.largest > 1


os.register_at_fork(after_in_child=_after_fork)


def keep_freed_memory() -> None:
    """Let this process reuse freed memory instead of returning it to the system. Without this, a
    model with 30 million parameters spent half of its prefill time getting memory pages from the
    system again. Has an effect only with the GNU C library."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, KEPT_BYTES)
        set_option(M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the CPU to a device without waiting for queued work."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def for_autograd(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Detach a tensor from autograd's graph and convert it to a dtype. A tensor made in inference
    mode is copied, because autograd rejects such tensors."""
    wide = tensor.detach().to(dtype)
    return wide.clone() if wide.is_inference() else wide


def disable_cudnn_attention() -> None:
    """Disable cuDNN's attention in this process, for serving. Since version 2.11, torch prefers it
    on Hopper GPUs, where it spends tens of milliseconds on a plan for every new length of a prompt
    or step. Training keeps it, because all training steps have the same shape. Has no effect
    without CUDA."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread in a `with` block, while a decoder computes with its own threads.
    Torch has little to do there, and its threads would compete with the decoder's for the
    processors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def available_processors(groups: Sequence[Path] | None = None) -> int:
    """Number of processors that this process may use, within the limits of taskset and of its
    container. A control group's limit on processor time is converted to processors, rounded up.
    `groups` are the folders of the control groups to read."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    if groups is None:
        groups = (*memory_groups(), GROUPS / "cpu", GROUPS / "cpu,cpuacct")
    limits = map(_group_processors, groups)
    return max(1, min([count, *(limit for limit in limits if limit is not None)]))


def machine_memory(groups: Sequence[Path] | None = None) -> int:
    """Bytes of memory that this process may use in total: the memory of the machine, or the limit
    of its container. `groups` are the folders of the control groups to read."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = map(_group_limit, memory_groups() if groups is None else groups)
    return min([total, *(limit for limit in limits if limit is not None)])


def free_memory(groups: Sequence[Path] | None = None, meminfo: Path = MEMINFO) -> int:
    """Bytes of memory that this process can get now without swapping: Linux's MemAvailable, or what
    is left of the container's limit. Memory of cached files counts as free."""
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
    """The folders of the control groups that may limit this process: its own group and the groups
    above it, in versions 1 and 2 of control groups. In a container there may be no folder with the
    name of the process's own group. Its folder is then the root folder."""
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
    """The memory limit of a control group in bytes; None without a limit."""
    limits = [_number(group / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((limit for limit in limits if limit is not None), default=None)


def _group_processors(group: Path) -> int | None:
    """The limit of a control group on processor time, as a number of processors; None without a
    limit."""
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
    """Bytes in use by a control group, without cached files; None if the group does not report
    it."""
    current, usage = _number(group / "memory.current"), _number(group / "memory.usage_in_bytes")
    used, prefix = (current, "") if current is not None else (usage, "total_")
    if used is None:
        return None
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    return used - sum(_field(group / "memory.stat", name) or 0 for name in names)


def _number(path: Path) -> int | None:
    """The number in a file that contains nothing else; None if the file is missing or says
    "max"."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    """The number in the line that begins with `name`; None if there is no such line."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    words = (line.split() for line in lines)
    return next((int(word[1]) for word in words if len(word) > 1 and word[0] == name), None)


def unproven(device: str) -> str | None:
    """A warning that logitd was never tested on this kind of GPU; None for a CPU and for the GPUs
    of CARDS_RUN. `device` is a result of `describe`."""
    if not device.startswith("cuda") or any(card in device for card in CARDS_RUN):
        return None
    return (
        "logitd was never tested on this kind of GPU; `python -m benchmarks.gpu` compares its "
        "results with the CPU's"
    )


def describe(device: torch.device) -> str:
    """The device with its model: "cuda:0 (NVIDIA H200)" or "cpu (AVX512)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    return str(device)
