"""Ranks: the processes that train one model together, started by `torchrun`.

Each computes its share of a step's sequences (`model/data/batches.py`); the gradients are added
up before the update, so all take the same step. Rank 0 writes, reports and decides; `as_the_first`
tells the others. Without `torchrun` there is one rank, and everything here does nothing.

Two kinds of traffic. Gradients go where they are: NCCL on CUDA, gloo on a CPU. Small numbers and
waiting go over gloo on the CPU, without a time limit, because rank 0 may prepare a text for hours
while the others wait; when a process ends, the others notice at once, since its connections close.

What each has of the model is another matter: a copy, as here, or a part of it
(`model/training/distributed/fsdp.py`). The run directory is read in every process, so several
machines need a file system that they share.
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

from model.device import DeviceError, available_processors, choose_device
from model.training.config import TrainingError

NO_LIMIT = timedelta(days=365)
"""How long one process waits for another: gloo wants a number."""

BUCKET = 2**24
"""Gradient elements that travel at once: 64 MB of memory, and far above the cost of a message."""


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is; `local` counts those of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    control: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this process: with several, CUDA device LOCAL_RANK for "cuda" or "auto"."""
        if self.size == 1:
            return choose_device(name)
        if name.startswith("cuda:"):
            raise DeviceError(
                f"device {name!r} is one for {self.size} processes: say 'cuda', and each takes its "
                "own"
            )
        device = choose_device(name)
        if device.type != "cuda":
            return device
        if self.local_size > (count := torch.cuda.device_count()):
            raise DeviceError(
                f"{self.local_size} processes on this machine need as many CUDA devices, and there "
                f"are {count}: start {count} with --nproc-per-node, or train with --device cpu"
            )
        return torch.device("cuda", self.local_rank)

    def threads(self, given: int) -> int:
        """Threads of this process; 0 are its part of the machine's processors."""
        return given or max(1, available_processors() // self.local_size)

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks; all of one device and dtype."""
        if self.size == 1:
            return
        with self._with_the_others():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                sums = flat.split([tensor.numel() for tensor in bucket])
                for tensor, total in zip(bucket, sums, strict=True):
                    tensor.copy_(total.view_as(tensor))

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks of a tensor on the CPU."""
        if self.size > 1:
            with self._with_the_others():
                dist.all_reduce(numbers, group=self.control)
        return numbers

    def highest(self, numbers: Sequence[float]) -> list[float]:
        """Of each number the highest over all ranks, the same on all of them."""
        if self.size == 1:
            return list(numbers)
        each = torch.tensor(numbers, dtype=torch.float64)
        with self._with_the_others():
            dist.all_reduce(each, dist.ReduceOp.MAX, group=self.control)
        return each.tolist()

    def as_the_first(self, number: float) -> float:
        """What the first process says, on all of them."""
        return self.highest([number if self.leads else -math.inf])[0]

    def wait(self) -> None:
        """Until all ranks are here."""
        self.total(torch.zeros(1))

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Says so where another process has ended, in traffic that is torch's own: there any error
        of a computation may be raised, and gloo has no class for its own."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
                raise self._deserted() from error
            raise

    def follows(self) -> TrainingError:
        """What ends this process where the first has said why all end."""
        return TrainingError(f"process {self.rank} of {self.size} stops with the first")

    @contextmanager
    def _with_the_others(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what gloo and NCCL raise when a connection has closed
            raise self._deserted() from error

    def _deserted(self) -> TrainingError:
        return TrainingError(
            f"process {self.rank} of {self.size} stops: another process of the run has ended, and "
            "what it said last tells why"
        )


ALONE = Ranks()


def read_ranks(environment: Mapping[str, str]) -> Ranks:
    """Who this process is, as `torchrun` tells it. Raises TrainingError."""
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
            f"the environment describes no process of {size}: RANK is {ranks.rank}, LOCAL_RANK "
            f"{ranks.local_rank} of {ranks.local_size}; start with torchrun"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            raise TrainingError(
                f"WORLD_SIZE is {size}, but {name} is not set: start several processes with "
                "torchrun, or unset WORLD_SIZE to train in one"
            )
    return ranks


@contextmanager
def together(environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """Meet the other processes, if there are any, and leave them at the end."""
    ranks = read_ranks(environment)
    if ranks.size == 1:
        yield ranks
        return
    try:
        # Which of the two it is depends on where the gradients are.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        control = dist.new_group(backend="gloo", timeout=NO_LIMIT)
    except (RuntimeError, ValueError) as error:
        raise TrainingError(
            f"process {ranks.rank} of {ranks.size} cannot meet the others at "
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
            f"{name} is {'not set' if text is None else repr(text)}: it says which of several "
            "processes this one is; start them with torchrun, or unset WORLD_SIZE to train in one"
        )
    return int(text)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that travel together."""
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
