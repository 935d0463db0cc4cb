"""Tap: a callback that gets every stage of a forward pass and may change it.

`GPT.transform` calls a tap with the name (`model/transformer/stages.py`) and value of each stage,
and continues with the tensor that the tap returns. Training and ordinary serving use `UNTAPPED`,
which changes nothing. `model/inference/kernels/eager/taps.py` has the taps that record or change
stages.
"""

from typing import Protocol

from torch import Tensor


class Tap(Protocol):
    """A tap. Values have the axes of the forward pass: (B, T, ...), or (B, heads, T, ...) for the
    stages in `stages.HEADS_FIRST`."""

    def wants(self, layer: int | None, stage: str) -> bool:
        """True if the tap uses a stage. Expensive stages are computed only in that case."""

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        """Return the value with which the forward pass continues. Some stages are computed block by
        block; then `offset` is the index, along T, of the first position in `value`."""


class _Untapped:
    def wants(self, layer: int | None, stage: str) -> bool:
        return False

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        return value


UNTAPPED: Tap = _Untapped()
