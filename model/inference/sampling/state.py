"""SamplingState: the sampling record of the sequence in each slot.

Everything in a record except the position is known when a sequence begins to decode, so it is
written once, and a step fills in positions only. Mostly the same sequences decode from step to
step, and the array of the last step is reused: the CPU caches are cold after a forward pass, and
rebuilding it would cost more.
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
        """Set how the slot's tokens are sampled, for sequence `index` of its prompt."""
        self._records[slot] = sampling_rows([row_of(params, index, position=0)])[0]
        self._processed[slot] = needs_logits_processing(params)
        self._last_slots = None

    def rows(self, slots: list[int], positions: list[int]) -> tuple[SamplingRows, tuple[int, ...]]:
        """Records of the tokens at these positions of these slots, a row each, and the indices of
        the rows that need logits processing. The array is valid until the next call."""
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
    """True if rows with these parameters may need steps 1 to 6 of the sampler, or logprobs; then
    `sample` needs their texts (`RowContext`)."""
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
