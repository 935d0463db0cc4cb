"""Sampling on a device: the rows' parameters as integers, and the filters.

Computes steps 8 to 10 of `model/inference/sampling/sampler.py` with the filters of
`sampling/sample.py`. Here all rows take the same path, without a decision on the host and with
shapes known in advance, so that the path can be recorded. A row's uniform number is uploaded with
its parameters (`pack`), because Philox would need seventy small kernels on the device.
`sampling_kernels.py` chooses the tokens. A GPU adds in a different order from a CPU, so a number
within a rounding error of a threshold may fall on the other side of it.

Shapes: R rows, V vocabulary.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logitd.model.inference.sampling.philox import uniforms
from logitd.model.inference.sampling.sample import (
    COLDEST,
    SamplingRows,
    above_floor,
    likeliest,
)

FIELDS = 6
"""Number of 64-bit integers that hold the sampling parameters of one row."""
_GREEDY, _DIVISOR, _FLOOR, _TOP_K, _TOP_P, _UNIFORM = range(FIELDS)

NO_TOKEN = -1
"""Stands for the token of a row whose logits are not finite."""


def has_filters(sampling: SamplingRows) -> bool:
    """True if a row that is not greedy has top_k, top_p or min_p."""
    filters = (sampling["top_k"] > 0) | (sampling["top_p"] < 1) | (sampling["floor"] > -math.inf)
    return bool((filters & (sampling["divisor"] > 0)).any())


def pack(sampling: SamplingRows) -> npt.NDArray[np.int64]:
    """Pack sampling rows into (R, FIELDS) integers. Floats are stored as the bits of float64."""
    packed = np.zeros((len(sampling), FIELDS), dtype=np.int64)
    floats = packed.view(np.float64)
    packed[:, _GREEDY] = sampling["divisor"] == 0
    floats[:, _DIVISOR] = np.maximum(sampling["divisor"], COLDEST)  # avoids a division by 0
    floats[:, _FLOOR] = sampling["floor"]
    packed[:, _TOP_K] = sampling["top_k"]
    floats[:, _TOP_P] = sampling["top_p"]
    if not packed[:, _GREEDY].all():
        floats[:, _UNIFORM] = uniforms(sampling["seed"], sampling["position"], sampling["index"])
    return packed


def filter_rows(logits: Tensor, packed: Tensor) -> Tensor:
    """Set logits (R, V), float32, to -inf for the ids that the filters of their row drop. `packed`
    (R, FIELDS) is the result of `pack` on the device. Greedy rows do not change."""
    floats = packed.view(torch.float64)
    kept = logits / floats[:, _DIVISOR, None].float()
    kept = likeliest(kept, packed[:, _TOP_K, None], floats[:, _TOP_P, None])
    kept = above_floor(kept, floats[:, _FLOOR, None].float())
    greedy = packed[:, _GREEDY, None] != 0
    return torch.where(greedy | (kept > -math.inf), logits, -math.inf)
