"""Buffers: tensors of a state dict that are not weights.

Causal masks, rotary tables, position ids and counters, told by their names, their dtype or their
elements. Does not say what a mask or a table means for the computation: see `questions.py`.
"""

import torch
from torch import Tensor

from logitd.model.convert.by_role import names as words


def is_buffer(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is not a weight: by its name, its dtype, or because it is a causal mask."""
    last = name.rpartition(".")[2]
    if words.matches(words.BUFFERS, last.lstrip("_")) or tensor.is_complex():
        return True
    if not tensor.is_floating_point():
        return tensor.dtype in (torch.bool, torch.int64, torch.int32) or tensor.dim() == 0
    if tensor.dim() == 0 or tensor.dim() > 3:
        return True
    return is_causal_mask(tensor)


def is_causal_mask(tensor: Tensor) -> bool:
    """Whether a tensor (..., T, T) has one value up to each position and another after it."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2:
        return False
    square = tensor.reshape(-1, *tensor.shape[-2:])[0]
    low, high = square[0, 0], square[0, -1]
    if low == high:
        return False
    lower = torch.ones_like(square, dtype=torch.bool).tril()
    return bool((square[lower] == low).all() and (square[~lower] == high).all())
