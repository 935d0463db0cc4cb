"""Windows: the tokens on which a loss is measured, in batches of inputs and targets.

`validation_windows` selects fixed parts of a text, `rolling_windows` covers all of it.

Shapes: B windows in a batch, T positions.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logitd.model.data.errors import DataError
from logitd.model.data.shards import Shard
from logitd.model.text.tokenizer import Tokenizer

UNCOUNTED = -100
"""Target at a position whose token was already counted in an earlier window."""


class Windows:
    """Windows of `width` tokens that begin at `starts`, in ascending order. A token in several
    windows is counted in the first of them."""

    def __init__(
        self,
        shard: Shard,
        tokenizer: Tokenizer,
        *,
        starts: Sequence[int],
        width: int,
        batch_size: int,
    ) -> None:
        self.starts, self.width = starts, width
        self.byte_lengths = byte_lengths(tokenizer)  # (V,)
        self._tokens = shard.tokens
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets (B, T), batch by batch."""
        return (self.batch(index) for index in range(len(self)))

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.starts) // self._batch_size)

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) of one batch; the last may be smaller."""
        first = index * self._batch_size
        starts = self.starts[first : first + self._batch_size]
        rows = [self._tokens[start : start + self.width + 1].astype(np.int64) for start in starts]
        ids = torch.from_numpy(np.stack(rows))  # (B, T + 1)
        targets = ids[:, 1:].clone()
        for row, start in enumerate(starts):
            before = self.starts[first + row - 1] if first + row else start - self.width
            targets[row, : max(0, before + self.width - start)] = UNCOUNTED
        return ids[:, :-1], targets


def validation_windows(
    shard: Shard, tokenizer: Tokenizer, *, window: int, batch_size: int, batches: int | None
) -> Windows:
    """The windows of an evaluation during training, the same each time: all windows of the text, or
    at most `batches` batches of windows that are spread evenly over it. An incomplete last window
    is omitted."""
    every = (shard.count - 1) // window
    count = every if batches is None else min(every, batches * batch_size)
    starts = [index * every // count * window for index in range(count)]
    return Windows(shard, tokenizer, starts=starts, width=window, batch_size=batch_size)


def rolling_windows(
    shard: Shard,
    tokenizer: Tokenizer,
    *,
    window: int,
    stride: int,
    batch_size: int,
    name: str = "the text",
) -> Windows:
    """Windows in which every token of a text except the first counts exactly once, `stride` tokens
    per window. Each token is predicted from at least window - stride tokens, or from all tokens
    before it if there are fewer. The last window ends with the text. Raises DataError for a text,
    which is called `name`, with fewer than 2 tokens, and for an impossible stride."""
    if shard.count < 2:
        raise DataError(
            f"{name} has too few tokens ({shard.count}): measuring a loss needs at least 2"
        )
    require_stride(stride, window)
    last = shard.count - 1  # the last token that is predicted
    width = min(window, last)
    starts = [*range(0, last - width, min(stride, width)), last - width]
    return Windows(shard, tokenizer, starts=starts, width=width, batch_size=batch_size)


def require_stride(stride: int, window: int) -> None:
    """Raise DataError for a stride that would leave out the tokens between two windows."""
    if not 1 <= stride <= window:
        raise DataError(
            f"stride is {stride}, but the model's context is {window}: set a stride from 1 to "
            f"{window}, so that no tokens between two windows are left out"
        )


def byte_lengths(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """The number of bytes (V,) of the text of each id; 0 for special tokens."""
    return np.array([tokenizer.text_bytes([token_id]) for token_id in range(tokenizer.vocab_size)])
