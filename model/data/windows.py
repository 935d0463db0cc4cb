"""Windows: which tokens a loss is measured on, in batches of inputs and targets.

Fixed windows for validation, rolling ones for a whole text. Computes no loss
(`model/training/step/validate.py`).

Shapes: B windows of a batch, T positions.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logitd.model.data.shards import Shard
from logitd.model.text.tokenizer import Tokenizer

UNCOUNTED = -100
"""In targets: a token that another window counts."""


class Windows(Protocol):
    """Batches of inputs and targets (B, T), targets that do not count being UNCOUNTED."""

    byte_lengths: npt.NDArray[np.int64]  # (V,)

    def __len__(self) -> int:
        """Batches."""

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one of them."""


class ValidationWindows:
    """The same windows at every evaluation: all of the text, or so many spread evenly over it."""

    def __init__(
        self,
        shard: Shard,
        tokenizer: Tokenizer,
        *,
        window: int,
        batch_size: int,
        batches: int | None,
    ) -> None:
        every = (shard.count - 1) // window
        count = every if batches is None else min(every, batches * batch_size)
        self._shard = shard
        self._window = window
        self._batch_size = batch_size
        self.starts = [index * every // count * window for index in range(count)]
        self.byte_lengths = byte_lengths(tokenizer)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets (B, T), batch by batch."""
        return (self.batch(index) for index in range(len(self)))

    def __len__(self) -> int:
        """Batches."""
        return -(-len(self.starts) // self._batch_size)

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) of one batch; the last may be smaller."""
        tokens, width = self._shard.tokens, self._window + 1
        starts = self.starts[index * self._batch_size :][: self._batch_size]
        rows = [tokens[start : start + width].astype(np.int64) for start in starts]
        ids = torch.from_numpy(np.stack(rows))  # (B, T + 1)
        return ids[:, :-1], ids[:, 1:]


class RollingWindows:
    """Windows over a whole text in which every token but the first counts exactly once.

    A window begins `stride` tokens after the one before it and counts what that did not reach, so
    each token is predicted from at least window - stride tokens before it, where there are as many.
    The last window is moved back to end with the text. With a stride of the whole window and a
    text that fills its windows, these are `ValidationWindows` of all batches.
    """

    def __init__(
        self, shard: Shard, tokenizer: Tokenizer, *, window: int, stride: int, batch_size: int
    ) -> None:
        if shard.count < 2:
            raise ValueError(f"{shard.count} tokens predict none: at least 2 are needed")
        if not 1 <= stride <= window:
            raise ValueError(f"stride is {stride}; it must be from 1 to the window's {window}")
        self._shard = shard
        self._batch_size = batch_size
        last = shard.count - 1  # the last token that is predicted
        self.width = min(window, last)
        self.stride = min(stride, self.width)
        self.starts = [*range(0, last - self.width, self.stride), last - self.width]
        self.byte_lengths = byte_lengths(tokenizer)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(index) for index in range(len(self)))

    def __len__(self) -> int:
        """Batches."""
        return -(-len(self.starts) // self._batch_size)

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) of one batch; what the window before reached does not count."""
        tokens, first = self._shard.tokens, index * self._batch_size
        starts = self.starts[first : first + self._batch_size]
        rows = [tokens[start : start + self.width + 1].astype(np.int64) for start in starts]
        ids = torch.from_numpy(np.stack(rows))  # (B, T + 1)
        targets = ids[:, 1:].clone()
        for row, start in enumerate(starts):
            before = self.starts[first + row - 1] if first + row else -self.width
            targets[row, : max(0, before + self.width - start)] = UNCOUNTED
        return ids[:, :-1], targets


def byte_lengths(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Bytes of text of every id (V,); special tokens stand for none."""
    return np.array(
        [
            0 if tokenizer.is_special(token_id) else len(tokenizer.token_bytes(token_id))
            for token_id in range(tokenizer.vocab_size)
        ]
    )
