"""Ranks: the processes that train one model together, started by `torchrun`.

Each process computes its part of a step's sequences (`model/data/batches.py`). The gradients are
added up before the update, so all processes make the same step. Rank 0, the main process, writes
files, reports and decides; `broadcast` sends its decisions to the others. Without `torchrun` there
is one rank, and the collective methods do nothing.

Gradients are sent by the backend of their device: NCCL on CUDA, gloo on a CPU. Counts, flags and
barriers use gloo on the CPU, without a time limit, because the main process may prepare a text for
hours while the others wait. When a process ends, its connections close, so the others notice
immediately. Every process reads the run directory, so several machines need a shared file system.
`model/training/distributed/fsdp.py` divides the model.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from logitd.model.device import DeviceError, available_processors, choose_device
from logitd.model.training.configuration.config import TrainingError

NO_LIMIT = timedelta(days=365)
"""Time limit of the control group. It is effectively unlimited, but gloo requires a number."""
BUCKET = 2**24
"""Number of gradient elements in a message. A full message takes 64 MB, so large that its fixed
cost is negligible."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of processes, in the whole run and (`local_*`) on
    this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    control: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this process. With several processes, "cuda" and "auto" mean CUDA device
        number LOCAL_RANK."""
        if self.size > 1 and name.startswith("cuda:"):
            raise DeviceError(
                f"device {name!r} is a single device, but there are {self.size} processes: set "
                "'cuda', which gives each process its own GPU"
            )
        device = choose_device(name)
        if self.size == 1 or device.type != "cuda":
            return device
        if self.local_size > (count := torch.cuda.device_count()):
            raise DeviceError(
                f"{self.local_size} processes on this machine need as many CUDA devices; it has "
                f"{count}: set --nproc-per-node to {count}, or --device to cpu"
            )
        return torch.device("cuda", self.local_rank)

    def threads(self, given: int) -> int:
        """Number of threads of this process; 0 means its share of the machine's processors."""
        return given or max(1, available_processors() // self.local_size)

    @torch.no_grad()
    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks. All tensors must have the same device and
        dtype."""
        if self.size == 1:
            return
        with self._peer_errors():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                sums = flat.split([tensor.numel() for tensor in bucket])
                for tensor, total in zip(bucket, sums, strict=True):
                    tensor.copy_(total.view_as(tensor))

    def all_reduce_cpu(self, numbers: Tensor) -> Tensor:
        """Replace a CPU tensor by its sum over all ranks, and return it."""
        if self.size > 1:
            with self._peer_errors():
                dist.all_reduce(numbers, group=self.control)
        return numbers

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        if self.size == 1:
            return list(numbers)
        maxima = torch.tensor(numbers, dtype=torch.float64)
        with self._peer_errors():
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.control)
        return maxima.tolist()

    def broadcast(self, number: float) -> float:
        return self.all_reduce_max([number if self.is_main else -math.inf])[0]

    def barrier(self) -> None:
        self.all_reduce_cpu(torch.zeros(1))

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Raise TrainingError if another process ends during communication that torch itself
        starts. gloo has no error class, so its errors are recognized by their text. Other errors
        are raised unchanged."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
                raise self._peer_lost() from error
            raise

    def secondary_error(self) -> TrainingError:
        """The error with which this process ends after the main process has reported the cause."""
        return TrainingError(
            f"process {self.rank} of {self.size} stops because the main process has stopped"
        )

    @contextmanager
    def _peer_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # raised by gloo and NCCL if a connection has closed
            raise self._peer_lost() from error

    def _peer_lost(self) -> TrainingError:
        return TrainingError(
            f"process {self.rank} of {self.size} stops: another process of the run has ended; "
            "see the last message of that process"
        )


ALONE = Ranks()


def read_ranks(environment: Mapping[str, str]) -> Ranks:
    """This process's rank, from the environment variables that `torchrun` sets. Raises
    TrainingError."""
    size = _number(environment, "WORLD_SIZE", 1)
    if size == 1:
        return Ranks()
    ranks = Ranks(
        rank=_number(environment, "RANK", None),
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", None),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", size),
    )
    if not (0 <= ranks.rank < size and 0 <= ranks.local_rank < ranks.local_size <= size):
        raise TrainingError(
            f"RANK {ranks.rank} of WORLD_SIZE {size} and LOCAL_RANK {ranks.local_rank} of "
            f"LOCAL_WORLD_SIZE {ranks.local_size} do not fit together: start with torchrun"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            raise TrainingError(
                f"WORLD_SIZE is {size}, but {name} is not set: start several processes with "
                "torchrun, or unset WORLD_SIZE to train in one process"
            )
    return ranks


@contextmanager
def process_group(environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """Connect to the other processes, if any, and disconnect at the end."""
    ranks = read_ranks(environment)
    if ranks.size == 1:
        yield ranks
        return
    try:
        # torch uses the backend for the device of each tensor.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        control = dist.new_group(backend="gloo", timeout=NO_LIMIT)
    except (RuntimeError, ValueError) as error:
        raise TrainingError(
            f"process {ranks.rank} of {ranks.size} cannot connect to the others at "
            f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}: {error}"
        ) from error
    try:
        yield replace(ranks, control=control)
    finally:
        dist.destroy_process_group()


def _number(environment: Mapping[str, str], name: str, default: int | None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise TrainingError(
            f"{name} is {'not set' if text is None else repr(text)}, but must be a whole number: "
            "start with torchrun, or unset WORLD_SIZE to train in one process"
        )
    return int(text)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if bucket and elements + tensor.numel() > BUCKET:
            yield bucket
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
    if bucket:
        yield bucket
