"""SamplingState: the sampling record of the sequence in each slot.

Everything in a record except the position is known when a sequence begins to decode, so it is
written once, and a step fills in positions only. Mostly the same sequences decode from step to
step, and the array of the last step is reused: the CPU caches are cold after a forward pass, and
rebuilding it would cost more.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.sample import (
    SAMPLING_ROW,
    SamplingRow,
    SamplingRows,
    sampling_rows,
)


@dataclass(frozen=True, slots=True)
class _Selection:
    slots: list[int]
    sampling: SamplingRows
    positions: npt.NDArray[np.uint32]  # a view of `sampling`: the same memory
    processed: tuple[int, ...]  # indices of the rows that need logits processing


class SamplingState:
    """One record per slot, and the selection of the last step."""

    def __init__(self, slots: int) -> None:
        self._sampling = np.zeros(slots, SAMPLING_ROW)
        self._processed = [False] * slots
        self._last: _Selection | None = None

    def begin(self, slot: int, params: SamplingParams, index: int) -> None:
        """Set how the slot's tokens are sampled, for sequence `index` of its prompt."""
        self._sampling[slot] = sampling_rows([row_of(params, index, position=0)])[0]
        self._processed[slot] = needs_logits_processing(params)
        self._last = None

    def rows(self, slots: list[int], positions: list[int]) -> tuple[SamplingRows, tuple[int, ...]]:
        """Records of the tokens at these positions of these slots, a row each, and the indices of
        the rows that need logits processing. The array is valid until the next call."""
        last = self._last
        if last is None or last.slots != slots:
            last = self._last = self._select(slots)
        last.positions[:] = positions
        return last.sampling, last.processed

    def _select(self, slots: list[int]) -> _Selection:
        sampling = self._sampling[slots]
        processed = tuple(row for row, slot in enumerate(slots) if self._processed[slot])
        return _Selection(slots, sampling, sampling["position"], processed)


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
