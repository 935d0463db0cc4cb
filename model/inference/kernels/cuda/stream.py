"""Streams: run the work of a device in order, without making the host wait.

`CudaStream` records work as a CUDA graph, which starts hundreds of kernels in one call, and copies
through pinned memory. `DirectStream` computes immediately on any device, for tests without a GPU.
"""

import itertools
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WARM_UP = 2
"""Number of runs before a recording, in which libraries choose kernels and allocate their
workspace."""

IN_FLIGHT = 4
"""Maximum number of queued copies in each direction. A further copy waits until the oldest of them
has finished."""

Compute = Callable[[], None]
Integers = npt.NDArray[np.int64]
Download = Callable[[], list[list[int]]]
"""Waits for integers from the device, but not for work queued after their copy, and returns
them."""


class Stream(Protocol):
    """A queue of work for a device, which runs the work in order."""

    def record(self, compute: Compute, undo: Compute) -> Compute:
        """Return a function that queues the work of `compute`, which uses tensors at fixed
        addresses and reads no number from the device. `record` itself may run `compute` a few
        times, each time followed by `undo`, which restores the inputs that `compute` overwrote."""

    def upload(self, values: Integers, target: Tensor) -> None:
        """Queue the copy of integers into a flat tensor of the device. The caller may change the
        integers afterwards."""

    def download(self, source: Tensor) -> Download:
        """Queue the copy of contiguous integers (A, B) from the device. The result must be read
        before the IN_FLIGHT-th download after it, or not at all."""


class DirectStream:
    """A stream that queues nothing: each call does its work before it returns."""

    def record(self, compute: Compute, undo: Compute) -> Compute:
        return compute

    def upload(self, values: Integers, target: Tensor) -> None:
        target.copy_(torch.from_numpy(values.ravel()))

    def download(self, source: Tensor) -> Download:
        values: list[list[int]] = source.tolist()  # now, because the next step overwrites them
        return lambda: values


class CudaStream:
    """CUDA graphs in one memory pool: a graph may overwrite the intermediate results of another, so
    all of them together take little more memory than the largest. Lasting results go into tensors
    allocated outside the pool. Copies go through pinned buffers that are used in turn.

    Source: PyTorch's notes on CUDA graphs (warm-up on a side stream, a shared pool).
    """

    def __init__(self, device: torch.device, most: int) -> None:
        """`most`: maximum number of integers in a copy."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all recordings: libraries keep a workspace for every stream they see.
        self._side = torch.cuda.Stream(device)
        self._up, self._down = (
            itertools.cycle([_Pinned(most) for _ in range(IN_FLIGHT)]) for _ in range(2)
        )

    def record(self, compute: Compute, undo: Compute) -> Compute:
        with torch.cuda.device(self._device):
            main, side = torch.cuda.current_stream(), self._side
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    compute()
                    undo()
            main.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Thread-local: other threads may use the device during the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            ):
                compute()
        return graph.replay

    def upload(self, values: Integers, target: Tensor) -> None:
        pinned = next(self._up)
        pinned.copied.synchronize()  # the last copy out of this memory
        pinned.numbers[: values.size] = values.ravel()
        target.copy_(pinned.memory[: values.size], non_blocking=True)
        pinned.copied.record(torch.cuda.current_stream(self._device))

    def download(self, source: Tensor) -> Download:
        pinned, count = next(self._down), source.numel()
        pinned.memory[:count].copy_(source.view(-1), non_blocking=True)
        pinned.copied.record(torch.cuda.current_stream(self._device))

        def integers() -> list[list[int]]:
            pinned.copied.synchronize()
            return pinned.numbers[:count].reshape(source.shape).tolist()

        return integers


class _Pinned:
    """Pinned memory for integers, and an event recorded after its last copy."""

    def __init__(self, size: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        self.numbers: Integers = self.memory.numpy()
        self.copied = torch.cuda.Event()
