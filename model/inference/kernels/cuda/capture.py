"""Capture: work on a device that is recorded once and then started as a whole.

What is recorded reads and writes tensors that stay where they are, has the same shapes each time
and never asks the device for a number. `CudaGraphs` makes a CUDA graph of it: hundreds of kernels
start by one call. `DirectCalls` just calls it again, on any device: the same work, without the
gain, so that code which records can be tested without a GPU.
"""

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UP = 2
"""Runs before a recording, in which libraries choose kernels and take their workspace."""

Compute = Callable[[], None]


class Capture(Protocol):
    """Records work."""

    def record(self, compute: Compute) -> Compute:
        """Something that does what `compute` does each time it is called. `compute` may have been
        run before this returns, or not, so running it twice must do the same as once."""


class DirectCalls:
    """No recording: every call computes, one operation after the other."""

    def record(self, compute: Compute) -> Compute:
        return compute


class CudaGraphs:
    """CUDA graphs in one pool of memory: what one works with, another may overwrite when it is its
    turn, so all of them together take hardly more than the largest. Results that have to stay
    belong into tensors made outside.

    Source: PyTorch's notes on CUDA graphs (warm-up on a side stream, a shared pool).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: libraries keep a workspace for every stream that they have ever seen.
        self._stream = torch.cuda.Stream(device)

    def record(self, compute: Compute) -> Compute:
        with torch.cuda.device(self._device):
            main, side = torch.cuda.current_stream(), self._stream
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    compute()
            main.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Only this thread is kept from what cannot be recorded: others may use the device.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            ):
                compute()
        return graph.replay


def capture_for(device: torch.device) -> Capture:
    """Graphs where there can be any."""
    return CudaGraphs(device) if device.type == "cuda" else DirectCalls()
