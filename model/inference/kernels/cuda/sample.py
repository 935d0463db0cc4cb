"""Sampling on a device: tokens of all rows of a step at once, without the host in between.

Steps 7 to 11 of `model/inference/sampling/sampler.py`. The twin, `sampling/sample.py`, reads values
from the device; here all rows take the same path with shapes known in advance, so it can be
recorded. A row's uniform number is uploaded with its parameters (`pack`), because Philox would be
seventy small kernels on the device. On a GPU sums run in another order, so a number within a
rounding of an edge may fall on its other side; on a CPU the tokens are the twin's.

Shapes: R rows, V vocabulary.
"""

import math
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logitd.model.inference.sampling.philox import uniforms
from logitd.model.inference.sampling.sample import COLDEST, LARGEST_LOGIT, SamplingRows

FIELDS = 6
"""64-bit integers that hold the sampling parameters of one row."""
_GREEDY, _DIVISOR, _FLOOR, _TOP_K, _TOP_P, _UNIFORM = range(FIELDS)

NO_TOKEN = -1
"""Token of a row that is not finite."""


class SamplingKind(IntEnum):
    """The work that a step's rows need. Each kind includes the ones before it and chooses the same
    tokens."""

    GREEDY = 0  # an argmax
    PLAIN = 1  # temperature, no filters
    FILTERED = 2  # a sort of every row


def kind_of(sampling: SamplingRows) -> SamplingKind:
    """The least kind that serves all rows."""
    random = sampling["divisor"] > 0
    if not random.any():
        return SamplingKind.GREEDY
    filters = (sampling["top_k"] > 0) | (sampling["top_p"] < 1) | (sampling["floor"] > -math.inf)
    return SamplingKind.FILTERED if (random & filters).any() else SamplingKind.PLAIN


def pack(sampling: SamplingRows) -> npt.NDArray[np.int64]:
    """The sampling rows as (R, FIELDS): integers, and floats as the bits of float64."""
    packed = np.empty((len(sampling), FIELDS), dtype=np.int64)
    floats = packed.view(np.float64)
    packed[:, _GREEDY] = sampling["divisor"] == 0
    floats[:, _DIVISOR] = np.maximum(sampling["divisor"], COLDEST)  # avoids a division by 0
    floats[:, _FLOOR] = sampling["floor"]
    packed[:, _TOP_K] = sampling["top_k"]
    floats[:, _TOP_P] = sampling["top_p"]
    floats[:, _UNIFORM] = uniforms(sampling["seed"], sampling["position"], sampling["index"])
    return packed


def sample_rows(logits: Tensor, computed: Tensor, packed: Tensor, kind: SamplingKind) -> Tensor:
    """A token of each row of `logits` (R, V), float32: int64 (R,). It is NO_TOKEN if the row of
    `computed` (R, V) is not finite or exceeds LARGEST_LOGIT. `packed` (R, FIELDS) is the result of
    `pack` on the device of the logits."""
    usable = computed.abs().amax(dim=-1) <= LARGEST_LOGIT  # NaN fails it too
    token_ids = logits.argmax(dim=-1)
    if kind is not SamplingKind.GREEDY:
        floats = packed.view(torch.float64)
        scaled = logits / floats[:, _DIVISOR, None].float()
        if kind is SamplingKind.FILTERED:
            scaled = filtered_rows(
                scaled, packed[:, _TOP_K], floats[:, _TOP_P], floats[:, _FLOOR].float()
            )
        probs = scaled.double().softmax(dim=-1)
        random = pick(probs, probs.cumsum(dim=-1), floats[:, _UNIFORM])
        token_ids = torch.where(packed[:, _GREEDY] != 0, token_ids, random)
    return token_ids.masked_fill(~usable, NO_TOKEN)


def filtered_rows(logits: Tensor, top_k: Tensor, top_p: Tensor, floors: Tensor) -> Tensor:
    """Steps 8 to 10: logits (R, V) with -inf for the ids that the filters drop. top_k, top_p and
    floors are (R,). The arithmetic is that of `filtered` in the twin."""
    width = logits.shape[-1]
    values, order = logits.sort(dim=-1, descending=True, stable=True)  # (R, V)
    count = top_k.masked_fill(top_k == 0, width).clamp(max=width)
    kth = values.gather(-1, count[:, None] - 1)  # (R, 1)
    values = values.masked_fill(values < kth, -math.inf)
    probs = values.double().softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs  # of the likelier ids
    outside = (mass_before >= top_p[:, None]) & (top_p[:, None] < 1)
    dropped = torch.empty_like(outside).scatter(-1, order, (values == -math.inf) | outside)
    logits = logits.masked_fill(dropped, -math.inf)
    lowest = logits.amax(dim=-1, keepdim=True) + floors[:, None]
    return logits.masked_fill(logits < lowest, -math.inf)


def pick(probs: Tensor, cumulated: Tensor, uniform: Tensor) -> Tensor:
    """Step 11 on probabilities (R, V) and their running sums, by uniform numbers (R,): int64 (R,).

    An id of probability 0 is never chosen, even if a sum that is computed in pieces decreases by a
    rounding from one id to the next. A row without any probability returns 0.
    """
    total = cumulated[:, -1:]
    # Rounded up, uniform * total may be the total: then it is the last id of any weight.
    reached = (cumulated > uniform[:, None] * total) | (cumulated >= total)
    return (reached & (probs > 0)).to(torch.uint8).argmax(dim=-1)  # the first of the largest
