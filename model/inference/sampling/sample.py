"""Sample: turns rows of logits into tokens by temperature, filters and one uniform number per row.

It computes steps 7 to 11 of `model/inference/sampling/sampler.py` in plain torch, for all rows
together; at temperature 0 the token is the argmax. The native decoder has its own implementation
(`model/inference/kernels/cpu/native/sample.h`). The sampler computes steps 1 to 6, which depend on
the text.

The parameters of all rows are one structured array with a record per row. `SamplingState` holds the
records of the sequences in the slots.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.philox import uniforms

LARGEST_LOGIT = 1e30
"""Largest accepted magnitude of a computed logit: up to this magnitude, no step of processing
overflows float32, whatever the parameters."""

COLDEST = 1e-5
"""Smallest temperature that is used. Lower temperatures, except 0, are raised to it. This prevents
overflow, and sampling at this temperature is practically greedy."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Parameters of one row. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 keep
    every token. (seed, position, index) determine the uniform number."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    index: int


SAMPLING_ROW = np.dtype(
    [
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("divisor", np.float32),  # the temperature; 0 is greedy
        ("floor", np.float32),  # log(min_p), relative to the largest logit
        ("top_k", np.int32),  # 0: all
        ("position", np.uint32),
        ("index", np.uint32),
    ]
)
"""A `SamplingRow` as a record. It is part of `SampleRow` in cpu/native/sample.h, with the same
layout."""

SamplingRows = npt.NDArray[np.void]
"""Records of several rows: SAMPLING_ROW (R,)."""

SampleFn = Callable[[Tensor, Tensor, SamplingRows], list[int | None]]
"""The type of `sample_tokens`, and of a decoder's `sample`."""


def sampling_rows(rows: Iterable[SamplingRow]) -> SamplingRows:
    return np.array(
        [
            (
                row.top_p,
                row.seed,
                max(row.temperature, COLDEST) if row.temperature else 0,
                math.log(row.min_p) if row.min_p else -math.inf,
                min(row.top_k, np.iinfo(np.int32).max),  # more than any vocabulary has
                row.position,
                row.index,
            )
            for row in rows
        ],
        SAMPLING_ROW,
    )


def usable(logits: Tensor) -> Tensor:
    """Booleans (R,): true for rows of the model's logits (R, V), before processing, whose
    magnitudes are at most LARGEST_LOGIT. Every operation refuses other rows."""
    # In float32, because LARGEST_LOGIT would be infinite in float16. A NaN makes the maximum NaN.
    return logits.abs().amax(dim=-1).float() <= LARGEST_LOGIT


def sample_tokens(logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
    """Sample a token from each row of `logits` (R, V), float32. `computed` (R, V) are the model's
    logits before processing: the token of a row that is not `usable` is None."""
    fine = usable(computed).tolist()
    token_ids = [0] * len(sampling)
    greedy = np.flatnonzero(sampling["divisor"] == 0).tolist()
    if greedy:
        best = logits[greedy].argmax(dim=-1).tolist()
        for i, token_id in zip(greedy, best, strict=True):
            token_ids[i] = token_id
    random = np.flatnonzero(sampling["divisor"]).tolist()
    if random:
        chosen = sampling[random]
        picked = _invert_cdf(filtered(logits[random], chosen), chosen)
        for i, token_id in zip(random, picked, strict=True):
            token_ids[i] = token_id
    return [token_id if ok else None for token_id, ok in zip(token_ids, fine, strict=True)]


def filtered(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """Logits (R, V) after steps 7 to 10, with -inf for dropped ids. Temperatures are above 0."""
    device = logits.device
    if (sampling["divisor"] != 1).any():
        logits = logits / _column(sampling, "divisor", device)
    if (sampling["top_k"] > 0).any() or (sampling["top_p"] < 1).any():
        top_k, top_p = (_column(sampling, name, device) for name in ("top_k", "top_p"))
        logits = likeliest(logits, top_k.long(), top_p)
    if (sampling["floor"] > -math.inf).any():
        logits = above_floor(logits, _column(sampling, "floor", device))
    return logits


def likeliest(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Steps 8 and 9: logits (R, V) with -inf for dropped ids. `top_k` and `top_p` are (R, 1)."""
    width = logits.shape[-1]
    # One stable sort for both. Ties stay in the order of their ids.
    values, order = logits.sort(dim=-1, descending=True, stable=True)  # (R, V)
    count = top_k.masked_fill(top_k == 0, width).clamp(max=width)
    kth = values.gather(-1, count - 1)  # (R, 1)
    values = values.masked_fill(values < kth, -math.inf)
    probs = values.double().softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs  # of more likely ids
    outside = (mass_before >= top_p) & (top_p < 1)
    dropped = torch.empty_like(outside).scatter(-1, order, (values == -math.inf) | outside)
    return logits.masked_fill(dropped, -math.inf)


def above_floor(logits: Tensor, floors: Tensor) -> Tensor:
    """Step 10: logits (R, V) with -inf for dropped ids. `floors` (R, 1) are the logarithms of
    min_p."""
    lowest = logits.amax(dim=-1, keepdim=True) + floors
    return logits.masked_fill(logits < lowest, -math.inf)


def _column(sampling: SamplingRows, name: str, device: torch.device) -> Tensor:
    """One field of all rows: (R, 1)."""
    return torch.from_numpy(sampling[name].copy()).to(device)[:, None]


def _invert_cdf(logits: Tensor, sampling: SamplingRows) -> list[int]:
    """Step 11 for rows (R, V): the sampled ids."""
    cumulated = logits.double().softmax(dim=-1).cumsum(dim=-1)  # (R, V)
    total = cumulated[:, -1:].contiguous()  # (R, 1)
    drawn = uniforms(sampling["seed"], sampling["position"], sampling["index"])
    u = torch.from_numpy(drawn).to(logits.device)[:, None]
    picked = torch.searchsorted(cumulated, u * total, right=True)
    last = torch.searchsorted(cumulated, total)  # u * total may round up to the total
    ids: list[int] = torch.minimum(picked, last)[:, 0].tolist()
    return ids


class SamplingState:
    """One sampling record per slot, and the rows of the last step.

    Everything in a record except the position is known when a sequence begins to decode. So records
    are written once, and a step sets only the positions. If the same sequences decode as in the
    last step, which is usual, the array of the last step is reused. Rebuilding it would be slow,
    because a forward pass leaves the CPU's caches cold.
    """

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
