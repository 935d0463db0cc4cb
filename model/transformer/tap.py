"""Tap: is shown every stage of a forward, and may change it.

`GPT.transform` calls a tap with each value that it computes, by the names of
`model/transformer/stages.py`, and goes on with what the tap returns: the same tensor where nothing
is changed. `UNTAPPED` is what training and serving pass. What records and changes is in
`model/inference/kernels/eager/taps.py`.
"""

from typing import Protocol

from torch import Tensor


class Tap(Protocol):
    """Values have the forward's own axes: (B, T, ...), and (B, heads, T, ...) for what heads
    compute (`HEADS_FIRST`)."""

    def wants(self, layer: int | None, stage: str) -> bool:
        """Whether it looks at a stage; those that cost something are computed only then."""

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        """What the forward goes on with. `offset`: the first of the forward's T positions that
        `value` holds, where that is computed a block of positions at a time."""


HEADS_FIRST = frozenset(
    (
        "attention.q_raw",
        "attention.k_raw",
        "attention.q",
        "attention.k",
        "attention.v",
        "attention.scores",
        "attention.probs",
        "attention.heads",
        "attention.head_out",
    )
)


class _Untapped:
    def wants(self, layer: int | None, stage: str) -> bool:
        return False

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        return value


UNTAPPED: Tap = _Untapped()
