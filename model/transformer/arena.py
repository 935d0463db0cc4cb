"""Arena: all weights of a model in contiguous memory on large pages.

A decode step reads every weight once, so memory bandwidth limits its speed. Bandwidth is highest
for sequential reads of 2 MB pages. Zeros between the tensors let a kernel read a little beyond the
end of a row.
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor, nn

PAGE = 2 * 2**20
LINE = 64
GAP = 2 * LINE
"""Bytes of zeros after each tensor. A kernel reads at most one cache line beyond the end of a
tensor."""


class Arena:
    """`nbytes` of zeroed memory for tensors."""

    def __init__(self, nbytes: int) -> None:
        # Private memory, because by default no system uses large pages for shared memory.
        memory = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = -whole.data_ptr() % PAGE
        self._room = whole[start : start + nbytes]
        self._used = 0

    @classmethod
    def around(cls, tensors: Sequence[Tensor]) -> "Arena | None":
        """The arena that contains exactly these tensors, in this order and at the addresses at
        which `place` would put them; None if there is no such arena."""
        memory, start = tensors[0].untyped_storage(), tensors[0].data_ptr()
        end = start
        for tensor in tensors:
            elsewhere = tensor.untyped_storage().data_ptr() != memory.data_ptr()
            if elsewhere or tensor.data_ptr() != end or not tensor.is_contiguous():
                return None
            end += room_for(tensor)
        if start % PAGE:
            return None
        arena = cls.__new__(cls)
        whole = torch.empty(0, dtype=torch.uint8).set_(memory)
        arena._room = whole[start - memory.data_ptr() : end - memory.data_ptr()]
        arena._used = end - start
        return arena

    def place(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into the arena. The copy is contiguous."""
        return self.make_room(tensor).copy_(tensor)

    def make_room(self, tensor: Tensor) -> Tensor:
        """Allocate a contiguous tensor of zeros with the shape and dtype of `tensor`."""
        size = tensor.numel() * tensor.element_size()
        taken = self._room[self._used : self._used + size]
        self._used += room_for(tensor)
        return taken.view(tensor.dtype).view(tensor.shape)

    def rest(self) -> Tensor:
        """The unused memory of the arena, uint8. The next tensor starts at its beginning."""
        return self._room[self._used :]


def room_for(tensor: Tensor) -> int:
    """Bytes that a tensor takes in an arena."""
    return room_for_bytes(tensor.numel() * tensor.element_size())


def room_for_bytes(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes in an arena."""
    return -(-size // LINE) * LINE + GAP


def move_to_arena(module: nn.Module) -> Arena:
    """Move the parameters of a module into an arena, in the order in which they were created, which
    is the order of the forward pass. They remain the module's parameters, and no second copy is
    kept. Does nothing if they are already in an arena."""
    parameters = list(module.parameters())
    arena = Arena.around(parameters)
    if arena is None:
        arena = Arena(sum(map(room_for, parameters)))
        for parameter in parameters:
            parameter.data = arena.place(parameter.data)
    return arena


def allocate_in_arena(module: nn.Module) -> None:
    """Replace the parameters of a module, which are on the meta device, with zeros in an arena, in
    the same order as `move_to_arena`. The new parameters have no gradients."""
    arena = Arena(sum(map(room_for, module.parameters())))
    placed = {
        parameter: nn.Parameter(arena.make_room(parameter), requires_grad=False)
        for parameter in module.parameters()
    }
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part.register_parameter(name, placed[parameter])
