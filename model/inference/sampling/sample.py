"""Draw: from a row of logits to a token, by temperature, filters and one uniform number.

Steps 7 to 11 of what `model/inference/sampling/sampler.py` defines, in plain torch for all rows at
once; for temperature 0 an argmax. The native decoder has the same for its own logits
(`model/inference/kernels/cpu/native/draw.h`). Knows neither requests nor texts: what changes logits
because of the text is applied before.

What is said about the rows of a step travels as one table, a record for each: from token to token
of a sequence only the position in it changes, so a table is copied together and not made anew.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.inference.sampling.philox import uniform

LARGEST_LOGIT = 1e30
"""Up to here no step can leave float32, whatever the parameters."""

COLDEST = 1e-5
"""A lower temperature than this is greedy in all but name, and would overflow."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn from. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 keep
    every token. The uniform number is that of (seed, position, index)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    index: int


DRAW = np.dtype(
    [
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("divisor", np.float32),  # the temperature; 0 is greedy
        ("floor", np.float32),  # how far below the likeliest min_p lets a logit lie; -inf: any
        ("top_k", np.int32),  # 0: all
        ("position", np.uint32),
        ("index", np.uint32),
    ]
)
"""A `Draw` as a record. The middle of cpu/native/draw.h's `DrawnRow`, field by field."""

Draws = npt.NDArray[np.void]
"""How each of several rows is drawn from: DRAW (R,)."""

Drawing = Callable[[Tensor, Tensor, Draws], list[int | None]]
"""What `draw_tokens` is, and the native decoder's `draw`."""


def table(draws: Iterable[Draw]) -> Draws:
    """Records of these draws."""
    return np.array(
        [
            (
                draw.top_p,
                draw.seed,
                max(draw.temperature, COLDEST) if draw.temperature else 0,
                math.log(draw.min_p) if draw.min_p else -math.inf,
                min(draw.top_k, np.iinfo(np.int32).max),  # more than any vocabulary has
                draw.position,
                draw.index,
            )
            for draw in draws
        ],
        DRAW,
    )


def draw_tokens(logits: Tensor, computed: Tensor, draws: Draws) -> list[int | None]:
    """A token of each row of `logits` (R, V), float32. None where the row of `computed` (R, V),
    which is what the model gave, is not finite or beyond LARGEST_LOGIT."""
    usable = (computed.abs().amax(dim=-1) <= LARGEST_LOGIT).tolist()  # NaN fails it too
    token_ids = [0] * len(draws)
    greedy = np.flatnonzero(draws["divisor"] == 0).tolist()
    if greedy:
        best = logits[greedy].argmax(dim=-1).tolist()
        for i, token_id in zip(greedy, best, strict=True):
            token_ids[i] = token_id
    drawn = np.flatnonzero(draws["divisor"]).tolist()
    if drawn:
        chosen = draws[drawn]
        picked = _invert_cdf(filtered(logits[drawn], chosen), chosen)
        for i, token_id in zip(drawn, picked, strict=True):
            token_ids[i] = token_id
    return [token_id if fine else None for token_id, fine in zip(token_ids, usable, strict=True)]


def filtered(logits: Tensor, draws: Draws) -> Tensor:
    """Steps 7 to 10: logits (R, V) with -inf for what the filters drop. Temperatures above 0."""
    device, width = logits.device, logits.shape[-1]
    if (draws["divisor"] != 1).any():
        logits = logits / _column(draws, "divisor", device)
    if (draws["top_k"] > 0).any() or (draws["top_p"] < 1).any():
        # One stable sort serves both: equals stay in the order of their ids.
        values, order = logits.sort(dim=-1, descending=True, stable=True)  # (R, V)
        top_k = _column(draws, "top_k", device).long()
        kept = torch.where(top_k == 0, width, top_k).clamp(max=width)
        kth = values.gather(-1, kept - 1)  # (R, 1)
        values = values.masked_fill(values < kth, -math.inf)
        probs = values.double().softmax(dim=-1)
        top_p = _column(draws, "top_p", device)
        likelier = probs.cumsum(dim=-1) - probs  # the mass in front of each id
        behind = (likelier >= top_p) & (top_p < 1)
        dropped = (values == -math.inf) | behind
        logits = logits.masked_fill(
            torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf
        )
    if (draws["floor"] > -math.inf).any():
        lowest = logits.amax(dim=-1, keepdim=True) + _column(draws, "floor", device)
        logits = logits.masked_fill(logits < lowest, -math.inf)
    return logits


def _column(draws: Draws, name: str, device: torch.device) -> Tensor:
    """One field of all rows, (R, 1)."""
    return torch.from_numpy(draws[name].copy()).to(device)[:, None]


def _invert_cdf(logits: Tensor, draws: Draws) -> list[int]:
    """Step 11 on rows (R, V)."""
    cumulated = logits.double().softmax(dim=-1).cumsum(dim=-1)  # (R, V)
    total = cumulated[:, -1:].contiguous()  # (R, 1)
    places = draws[["seed", "position", "index"]].tolist()
    uniforms = [uniform(seed, position, index) for seed, position, index in places]
    u = torch.tensor(uniforms, device=logits.device, dtype=torch.float64)[:, None]
    picked = torch.searchsorted(cumulated, u * total, right=True)
    last = torch.searchsorted(cumulated, total)  # u * total may round up to the total
    ids: list[int] = torch.minimum(picked, last)[:, 0].tolist()
    return ids
