"""Originals: matrices of a GPT that its decoder has in another form, in memory only when wanted.

The native decoder computes with matrices that are compressed or quantized, and never reads the
GPT's own again. What computes by torch does: activations that are recorded or changed, and
attributions. So where nobody else computes with the GPT their memory goes back to the system, and
they are restored, every bit, before torch computes; from then on they stay. Meanwhile the
parameters are empty: whoever computes with them by mistake gets an error, not wrong numbers.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Restore = Callable[[Tensor], None]
"""Writes a matrix back to a tensor (rows, width)."""


@dataclass(frozen=True)
class _Original:
    """A layer's matrix: its parameter, and what restores it."""

    layer: nn.Linear
    weight: nn.Parameter
    restore: Restore


class Originals:
    """The matrices of one GPT that its decoder does not read. With `release` they leave memory one
    by one, as they are added."""

    def __init__(self, library: ctypes.CDLL, *, release: bool) -> None:
        library.logitd_forget.argtypes = (c_void_p, c_int64)
        self._library = library
        self._release = release
        self._released: list[_Original] = []

    def add(self, layer: nn.Linear, restore: Restore) -> None:
        """A layer whose matrix the decoder has in another form, which `restore` reads."""
        if not self._release:
            return
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        self._released.append(_Original(layer, weight, restore))
        layer.weight = nn.Parameter(weight.new_empty(0, 0), requires_grad=False)
        # That of whole pages, and on Linux alone.
        self._library.logitd_forget(weight.data_ptr(), weight.numel() * weight.element_size())

    def restore(self) -> None:
        """Have all of them in memory again, for good."""
        with torch.no_grad():
            for original in self._released:
                original.restore(original.weight.data)
                original.layer.weight = original.weight
        self._released.clear()
