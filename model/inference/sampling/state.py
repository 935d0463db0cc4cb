"""SamplingState: holds the sampling record of the sequence in each slot.

Everything in a record except the position is known when a sequence begins to decode. So records are
written once, and a step sets only the positions. If the same sequences decode as in the last step,
which is usual, the array of the last step is reused. Rebuilding it would be slow, because a forward
pass leaves the CPU's caches cold.
"""

import numpy as np

from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.sample import (
    SAMPLING_ROW,
    SamplingRow,
    SamplingRows,
    sampling_rows,
)


class SamplingState:
    """One record per slot, and the rows of the last step."""

    def __init__(self, slots: int) -> None:
        self._records = np.zeros(slots, SAMPLING_ROW)
        self._processed = [False] * slots
        self._last_slots: list[int] | None = None
        self._last_rows: tuple[SamplingRows, tuple[int, ...]] = self._records[:0], ()

    def begin(self, slot: int, params: SamplingParams, index: int) -> None:
        """Store the sampling parameters of the sequence in a slot. `index` is the number of the
        sequence among the n sequences of its prompt."""
        self._records[slot] = sampling_rows([row_of(params, index, position=0)])[0]
        self._processed[slot] = needs_logits_processing(params)
        self._last_slots = None

    def rows(self, slots: list[int], positions: list[int]) -> tuple[SamplingRows, tuple[int, ...]]:
        """The sampling records of a step's rows, and the indices of the rows that need logits
        processing. Each row is given by its slot and its position. The next call may overwrite the
        returned array."""
        if self._last_slots != slots:
            processed = tuple(row for row, slot in enumerate(slots) if self._processed[slot])
            self._last_slots, self._last_rows = slots, (self._records[slots], processed)
        self._last_rows[0]["position"] = positions
        return self._last_rows


def row_of(params: SamplingParams, index: int, position: int) -> SamplingRow:
    return SamplingRow(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        position,
        index,
    )


def needs_logits_processing(params: SamplingParams) -> bool:
    """True if rows with these parameters may need logprobs or steps 1 to 6 of the sampler, so that
    `sample` needs their `RowContext`."""
    return bool(
        params.logprobs is not None
        or params.constraint is not None
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.min_tokens
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )
