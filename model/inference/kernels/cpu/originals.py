"""Originals: frees the matrices of a GPT that its decoder holds in another form, and restores them.

The native decoder computes with compressed or quantized matrices and no longer reads the GPT's own
matrices. Only torch still reads them, to record or change activations and to compute attributions.
If nothing else computes with the GPT, the memory of these matrices is returned to the system. They
are restored to the same bits when torch first needs them, and then stay in memory. Until then the
parameters are empty, so computing with them by mistake raises an error instead of returning wrong
numbers.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor, nn

Restore = Callable[[Tensor], object]
"""Writes the original matrix to a tensor (rows, width)."""


class Originals:
    """The matrices of one GPT that its decoder does not read. With `release`, each matrix is freed
    when it is added."""

    def __init__(self, library: ctypes.CDLL, *, release: bool) -> None:
        library.logitd_forget.argtypes = (c_void_p, c_int64)
        self._library = library
        self._release = release
        self._released: list[tuple[nn.Linear, nn.Parameter, Restore]] = []

    def add(self, layer: nn.Linear, restore: Restore) -> None:
        """Add a layer whose matrix `restore` can compute from the decoder's form."""
        if not self._release:
            return
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        self._released.append((layer, weight, restore))
        layer.weight = nn.Parameter(weight.new_empty(0, 0), requires_grad=False)
        # Frees whole pages; does nothing outside Linux.
        self._library.logitd_forget(weight.data_ptr(), weight.numel() * weight.element_size())

    def restore(self) -> None:
        """Restore all freed matrices. They are not freed again."""
        with torch.no_grad():
            for layer, weight, restore in self._released:
                restore(weight.data)
                layer.weight = weight
        self._released.clear()
