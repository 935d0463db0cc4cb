"""Pinned: numbers that host and device send each other without waiting for one another.

A copy between pinned memory and a device runs when its turn comes, behind all work that the device
was given before; until then its buffer is the copy's. So each way has two buffers, taken in turn,
for as many steps as may be under way at once; and behind every copy stands a mark, by which one
waits for that copy and for nothing that was given to the device later.

On a CPU a copy is done when it is asked for, and there is nothing to wait for. Not here: what the
numbers mean, and who may overwrite what the device reads; one stream keeps its own order.
"""

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

AT_ONCE = 2
"""Steps that may be under way at once: one whose results are waited for, and the one behind it."""


class Buffer:
    """Pinned memory for 64-bit numbers, which one copy at a time reads or writes."""

    def __init__(self, device: torch.device, *shape: int) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._memory = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self.cells: npt.NDArray[np.int64] = self._memory.numpy()  # the same memory
        self.turn = 0  # how often it was copied into

    def copy_to(self, target: Tensor) -> None:
        """Have its first rows copied to the device, as many as `target` has."""
        self._copy(target, self._memory[: len(target)])

    def copy_from(self, source: Tensor) -> None:
        """Have numbers of the device copied into its first rows."""
        self.turn += 1
        self._copy(self._memory[: len(source)], source)

    def wait(self) -> None:
        """Wait until its last copy is done."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


class Sent:
    """Rows of 64-bit numbers that the host writes and the device reads, by one copy a step into
    `device`, a tensor that stays where it is."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.device = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._buffers = cycle([Buffer(device, rows, width) for _ in range(AT_ONCE)])

    def send(self, given: npt.NDArray[np.int64], rows: int) -> None:
        """Put `given` (B, width) in front, and copies of its first row up to `rows` behind it."""
        buffer = next(self._buffers)
        buffer.wait()  # the copy before its last may still be reading
        buffer.cells[: len(given)] = given
        buffer.cells[len(given) : rows] = given[0]
        buffer.copy_to(self.device[:rows])


class Received:
    """Numbers that the device leaves in `device`, a tensor that stays where it is, and that the
    host gets by one copy a step."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = torch.zeros(rows, dtype=torch.int64, device=device)
        self._every = [Buffer(device, rows) for _ in range(AT_ONCE)]
        self._buffers = cycle(self._every)

    def fetch(self, count: int) -> "Fetched":
        """Have the first `count` numbers brought, as they will be once the device has done all that
        it was given up to now. They can be read until the second fetch after this one."""
        buffer = next(self._buffers)
        buffer.copy_from(self.device[:count])
        return Fetched(buffer, buffer.turn, count)

    def wait(self) -> None:
        """Wait until everything is done that was fetched."""
        for buffer in self._every:
            buffer.wait()


@dataclass(frozen=True, slots=True)
class Fetched:
    """Numbers on their way from the device."""

    buffer: Buffer
    turn: int
    count: int

    def numbers(self) -> list[int]:
        """Wait for them."""
        assert self.turn == self.buffer.turn, "its buffer was given to a later step"
        self.buffer.wait()
        numbers: list[int] = self.buffer.cells[: self.count].tolist()
        return numbers
