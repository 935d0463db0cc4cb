"""Large pages: zeroed memory that is read fast from one end to the other.

What is read as a stream, weights and keys and values, comes faster from 2 MB pages: the processor
looks up an address once for 512 of the usual pages, and asks ahead further than one of those. Linux
gives them where it is asked to; elsewhere the memory is the usual kind. A page exists when
something in it was first touched.
"""

import math
import mmap

import torch
from torch import Tensor

PAGE = 2 * 2**20


def zeroed_bytes(nbytes: int) -> Tensor:
    """So many zeros (uint8) that begin with a large page."""
    # Private: memory that processes could share gets large pages nowhere by default.
    memory = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    return whole[start : start + nbytes]


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`torch.zeros` on large pages; what would not fill one stays on small ones."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < PAGE:
        return torch.zeros(shape, dtype=dtype)
    return zeroed_bytes(nbytes).view(dtype).view(shape)
