"""Pinned memory: uploads and downloads of integers that neither host nor device waits for.

A copy between pinned memory and a device runs after all work that was queued on the device's stream
before; until then its buffer must not be touched. So each direction has two buffers, taken in turn,
for the two steps that may be in flight; and after every copy an event is recorded, by which the
host waits for that copy and for nothing that was queued later.

    host     fill A | upload A | fill B | upload B | wait for A's event | fill A | upload A | ...
    device          ... copy A | step 1 ......... | copy B | step 2 .......... | copy A | step 3

On a CPU a copy is done at once, and there is nothing to wait for. Not here: what the integers mean,
and who may overwrite what the device reads; one stream keeps its own order.
"""

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IN_FLIGHT = 2
"""Steps that may be in flight: one whose results are waited for, and the one after it."""


class Buffer:
    """Pinned memory for 64-bit integers, which one copy at a time reads or writes."""

    def __init__(self, device: torch.device, *shape: int) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._memory = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self.cells: npt.NDArray[np.int64] = self._memory.numpy()  # the same memory
        self.turn = 0  # how many downloads it has taken

    def copy_to(self, target: Tensor) -> None:
        """Have its first rows copied to the device, as many as `target` has."""
        self._copy(target, self._memory[: len(target)])

    def copy_from(self, source: Tensor) -> None:
        """Have integers of the device copied into its first rows."""
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


class PinnedUpload:
    """Rows of 64-bit integers that the host writes and the device reads, by one copy a step into
    `device`, a tensor that stays where it is."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.device = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._buffers = cycle([Buffer(device, rows, width) for _ in range(IN_FLIGHT)])

    def upload(self, values: npt.NDArray[np.int64], rows: int) -> None:
        """Upload `values` (B, width), then copies of its first row up to `rows`."""
        buffer = next(self._buffers)
        buffer.wait()  # its last copy may still be reading
        buffer.cells[: len(values)] = values
        buffer.cells[len(values) : rows] = values[0]
        buffer.copy_to(self.device[:rows])


class PinnedDownload:
    """Integers that the device leaves in `device`, a tensor that stays where it is, and that the
    host gets by one copy a step."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = torch.zeros(rows, dtype=torch.int64, device=device)
        self._all = [Buffer(device, rows) for _ in range(IN_FLIGHT)]
        self._buffers = cycle(self._all)

    def begin(self, count: int) -> "Download":
        """Queue the copy of the first `count` integers, as they will be once the device has done
        all that it was given up to now. They can be read until the second download after this."""
        buffer = next(self._buffers)
        buffer.copy_from(self.device[:count])
        return Download(buffer, buffer.turn, count)

    def wait(self) -> None:
        """Wait for all downloads."""
        for buffer in self._all:
            buffer.wait()


@dataclass(frozen=True, slots=True)
class Download:
    """Integers on their way from the device."""

    buffer: Buffer
    turn: int
    count: int

    def values(self) -> list[int]:
        """Wait for them."""
        assert self.turn == self.buffer.turn, "its buffer was given to a later step"
        self.buffer.wait()
        values: list[int] = self.buffer.cells[: self.count].tolist()
        return values
