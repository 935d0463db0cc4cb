"""Batches: which tokens a step trains on, as a pure function of (seed, sequence number).

The training tokens are cut into windows of the context length. Each pass over them begins at
another offset and visits the windows in another order, both drawn from (seed, pass) alone: nothing
has to be stored to resume, nothing else that draws random numbers can disturb it, and a step of
B x A sequences is the same set whether it is one batch of B * A or A batches of B.

Shapes: B sequences, T = window.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.training.shards import Shard


class Batches:
    """The windows of a shard in training order."""

    def __init__(self, shard: Shard, *, window: int, seed: int) -> None:
        if shard.count < window + 1:
            raise ValueError(f"{shard.count} tokens hold no window of {window} + 1")
        self.windows = (shard.count - 1) // window  # in one pass
        self._shard = shard
        self._window = window
        self._seed = seed
        self._pass = lru_cache(maxsize=2)(self._draw_pass)

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) of the sequences numbered first .. first + count - 1."""
        rows = np.stack([self._sequence(number) for number in range(first, first + count)])
        ids = torch.from_numpy(rows)  # (B, T + 1)
        return ids[:, :-1], ids[:, 1:]

    def _sequence(self, number: int) -> npt.NDArray[np.int64]:
        epoch, place = divmod(number, self.windows)
        offset, order = self._pass(epoch)
        # The last windows of a shifted pass run over the end: they go on at the beginning.
        start = (offset + int(order[place]) * self._window) % (self._shard.count - self._window)
        return self._shard.tokens[start : start + self._window + 1].astype(np.int64)

    def _draw_pass(self, epoch: int) -> tuple[int, npt.NDArray[np.int64]]:
        draw = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        offset = int(draw.integers(self._window))
        return offset, draw.permutation(self.windows)
