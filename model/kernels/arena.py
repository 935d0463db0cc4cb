"""Arena: all weights of a model one behind the other in memory, on large pages.

A decode step streams every weight once, so how fast memory is read decides its speed: from 2 MB
pages, in one direction. Between two tensors there are zeros, so that a kernel may read a little
beyond the end of a row.
"""

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor, nn

PAGE = 2 * 2**20
LINE = 64
GAP = 2 * LINE
"""Zeros behind each tensor: a kernel reads at most one line too far."""


class Arena:
    """Room for `nbytes` of tensors, zeroed."""

    def __init__(self, nbytes: int) -> None:
        # Private: memory that processes could share gets large pages nowhere by default.
        self._map = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        start = -whole.data_ptr() % PAGE
        self._room = whole[start : start + nbytes]
        self._used = 0

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in the arena, contiguous."""
        size = tensor.numel() * tensor.element_size()
        taken = self._room[self._used : self._used + size]
        self._used += room_for(tensor)
        placed = taken.view(tensor.dtype).view(tensor.shape)
        placed.copy_(tensor)
        return placed


def room_for(tensor: Tensor) -> int:
    """Bytes that a tensor takes in an arena."""
    size = tensor.numel() * tensor.element_size()
    return -(-size // LINE) * LINE + GAP


def settle(module: nn.Module) -> Arena:
    """Move the parameters of a module into an arena, where they stay the module's own: there is no
    second copy. In the order in which they were made, which is that of the forward."""
    parameters = list(_distinct(module.parameters()))
    arena = Arena(sum(room_for(parameter) for parameter in parameters))
    for parameter in parameters:
        parameter.data = arena.place(parameter.data)
    return arena


def _distinct(parameters: Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    return dict.fromkeys(parameters)
