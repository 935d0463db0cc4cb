"""Tap: an observer of a forward that sees every stage and may change it.

`GPT.transform` calls a tap with each value under its name in `model/transformer/stages.py` and
continues with the returned tensor, which is the same one if nothing changes. Training and serving
pass `UNTAPPED`. The taps that record and change are in `model/inference/kernels/eager/taps.py`.
"""

from typing import Protocol

from torch import Tensor


class Tap(Protocol):
    """Values have the axes of the forward: (B, T, ...), or (B, heads, T, ...) for the stages in
    `stages.HEADS_FIRST`."""

    def wants(self, layer: int | None, stage: str) -> bool:
        """True if the tap uses a stage. Expensive stages are computed only then."""

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        """Return the value to continue with. `offset` is the first of the forward's T positions in
        `value`, for stages that are computed a block of positions at a time."""


class _Untapped:
    def wants(self, layer: int | None, stage: str) -> bool:
        return False

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        return value


UNTAPPED: Tap = _Untapped()
