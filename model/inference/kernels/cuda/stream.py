"""Streams: work of a device in order, without waiting on the host.

`CudaStream` records work as a CUDA graph, which starts hundreds of kernels in one call, and copies
through pinned memory. `DirectStream` computes at once on any device, for tests without a GPU.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WARM_UP = 2
"""Runs before a recording: libraries choose kernels and allocate their workspace."""

Compute = Callable[[], None]
Integers = npt.NDArray[np.int64]
Download = Callable[[], list[int]]
"""Wait for integers of the device, and for no work queued after their copy."""


class Stream(Protocol):
    """A queue of work in order."""

    def record(self, compute: Compute) -> Compute:
        """Return a function that queues the work of `compute`, which uses tensors at fixed
        addresses and reads no number from the device. `compute` may run before this returns, so
        running it twice must have the effect of running it once."""

    def upload(self, values: Integers, target: Tensor) -> None:
        """Queue the copy of `values` into a tensor of the device. The caller may change them
        afterwards."""

    def download(self, source: Tensor) -> Download:
        """Queue the copy of integers of the device, (R,)."""


class DirectStream:
    """A stream that computes in every call."""

    def record(self, compute: Compute) -> Compute:
        return compute

    def upload(self, values: Integers, target: Tensor) -> None:
        target.copy_(torch.from_numpy(values))

    def download(self, source: Tensor) -> Download:
        values: list[int] = source.tolist()  # now: the next step overwrites them
        return lambda: values


class CudaStream:
    """CUDA graphs in one memory pool: a graph may overwrite the intermediate results of another, so
    all of them together take little more memory than the largest. Lasting results go into tensors
    allocated outside. Torch reuses pinned memory when the copies from and to it are done.

    Source: PyTorch's notes on CUDA graphs (warm-up on a side stream, a shared pool).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all recordings: libraries keep a workspace for every stream they see.
        self._side = torch.cuda.Stream(device)

    def record(self, compute: Compute) -> Compute:
        with torch.cuda.device(self._device):
            main, side = torch.cuda.current_stream(), self._side
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    compute()
            main.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Thread-local: other threads may use the device during the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            ):
                compute()
        return graph.replay

    def upload(self, values: Integers, target: Tensor) -> None:
        target.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def download(self, source: Tensor) -> Download:
        memory = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        memory.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))

        def integers() -> list[int]:
            copied.synchronize()
            return list(memory.tolist())

        return integers


def padded(rows: Integers, count: int) -> Integers:
    """Rows (R, ...) and copies of the first one, `count` in all, in contiguous memory."""
    return np.ascontiguousarray(np.concatenate((rows, rows[:1].repeat(count - len(rows), axis=0))))
