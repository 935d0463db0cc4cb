"""Batches: the tokens of a training step, as a pure function of (seed, sequence number, window).

Each pass over the text puts its documents into a different order, divides the tokens into windows
of equal length that begin at a different offset, and visits the windows in a different order. All
three depend only on (seed, pass, window). So a resumed run needs no stored state, and random
numbers drawn elsewhere do not affect the order. A step has the same B * A sequences whether it is
computed as one batch of B * A or as A batches of B, in one process or in several. The seed of
dropout also depends only on (seed, sequence number).

The text is not copied: a window is read from the shard, document by document. Each document takes 8
bytes of memory, plus 16 bytes for each pass in memory. At most two passes are in memory.

Shapes: B sequences, T = window.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logitd.model.data.errors import DataError
from logitd.model.data.shards import Shard


@dataclass(frozen=True)
class _Pass:
    """One pass over a text. A place is the index of a token in the text after its documents have
    been put into the order of this pass."""

    offset: int  # place of the first window
    windows: npt.NDArray[np.int64]  # order of the windows
    documents: npt.NDArray[np.int64]  # (D,), order of the documents
    ends: npt.NDArray[np.int64]  # (D,), place after the last token of each document


class Batches:
    """The windows of a shard in training order. `end_of_text` ends the documents of a shard that
    does not list them."""

    def __init__(self, shard: Shard, *, seed: int, end_of_text: int) -> None:
        self._shard = shard
        self._seed = seed
        self._ends = shard.document_ends(end_of_text)
        self._pass = lru_cache(maxsize=2)(self._draw_pass)

    def in_pass(self, window: int) -> int:
        """Number of windows in one pass. Raises ValueError if the text does not fill one."""
        if self._shard.count < window + 1:
            raise ValueError(f"{self._shard.count} tokens do not fill a window of {window} + 1")
        return (self._shard.count - 1) // window

    def batch(self, first: int, count: int, window: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) of the sequences numbered first .. first + count - 1."""
        rows = np.stack([self._sequence(number, window) for number in range(first, first + count)])
        ids = torch.from_numpy(rows)  # (B, T + 1)
        return ids[:, :-1], ids[:, 1:]

    def _sequence(self, number: int, window: int) -> npt.NDArray[np.int64]:
        epoch, index = divmod(number, self.in_pass(window))
        drawn = self._pass(epoch, window)
        # The last windows of a shifted pass would extend beyond the end, so they wrap around.
        place = drawn.offset + int(drawn.windows[index]) * window
        return self._read(drawn, place % (self._shard.count - window), window + 1)

    def _read(self, drawn: _Pass, place: int, count: int) -> npt.NDArray[np.int64]:
        """`count` tokens that begin at `place`, in the order of a pass."""
        parts = []
        index = int(np.searchsorted(drawn.ends, place, side="right"))
        while count:
            left = int(drawn.ends[index]) - place  # tokens of this document
            start = int(self._ends[drawn.documents[index]]) - left
            taken = min(left, count)
            parts.append(self._shard.tokens[start : start + taken])
            place, count, index = place + taken, count - taken, index + 1
        return np.concatenate(parts).astype(np.int64)

    def _draw_pass(self, epoch: int, window: int) -> _Pass:
        generator = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        offset = int(generator.integers(window))
        windows = generator.permutation(self.in_pass(window))
        documents = generator.permutation(len(self._ends))
        lengths = np.diff(self._ends, prepend=0)
        return _Pass(offset, windows, documents, np.cumsum(lengths[documents]))


@dataclass(frozen=True)
class RankBatch:
    """One process's part of every step: `passes` batches of `batch_size` sequences."""

    total: int  # sequences of a step in all processes
    first: int  # number of this process's first sequence within a step
    batch_size: int
    passes: int
    parts: int  # batches of a step in all processes

    def batches(self, step: int) -> range:
        """The number of the first sequence in each of this process's batches of a step. Sequences
        are numbered from the beginning of the run."""
        start = step * self.total + self.first
        return range(start, start + self.batch_size * self.passes, self.batch_size)


def rank_batch(batch_size: int, accumulate: int, *, rank: int, size: int) -> RankBatch:
    """Divide a step among `size` processes. Returns the part of process `rank`, in batches of at
    most `batch_size`.

    A step has batch_size * accumulate sequences for any `size`. If accumulate is a multiple of
    `size`, the batches are the same too. Raises DataError if the sequences cannot be divided
    evenly.
    """
    total = batch_size * accumulate
    own, rest = divmod(total, size)
    if rest:
        raise DataError(
            f"a step has {total} sequences (batch_size {batch_size} x accumulate {accumulate}), "
            f"which {size} processes cannot share evenly: use a number of processes that divides "
            f"{total}, or another batch_size or accumulate"
        )
    largest = next(count for count in range(batch_size, 0, -1) if own % count == 0)
    return RankBatch(total, rank * own, largest, own // largest, total // largest)


def noise_seed(seed: int, sequence: int) -> int:
    """The dropout seed of the batch whose first sequence has the number `sequence`."""
    return int(np.random.SeedSequence([seed, sequence]).generate_state(1, np.uint64)[0])
