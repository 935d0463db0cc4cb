"""Draw: from a row of logits to a token, by temperature, filters and one uniform number.

Steps 7 to 11 of what `model/engine/sampler.py` defines, in plain torch for all rows at once; for
temperature 0 an argmax. The native decoder has the same for its own logits
(`model/kernels/native/draw.h`). Knows neither requests nor texts: what changes logits because of
the text is applied before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.philox import uniform

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

    @property
    def divisor(self) -> float:
        """What logits are divided by."""
        return max(self.temperature, COLDEST)


Drawing = Callable[[Tensor, Tensor, Sequence[Draw]], list[int | None]]
"""What `draw_tokens` is, and the native decoder's `draw`."""


def draw_tokens(logits: Tensor, computed: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """A token of each row of `logits` (R, V), float32. None where the row of `computed` (R, V),
    which is what the model gave, is not finite or beyond LARGEST_LOGIT."""
    usable = (computed.abs().amax(dim=-1) <= LARGEST_LOGIT).tolist()  # NaN fails it too
    token_ids = [0] * len(draws)
    greedy = [i for i, draw in enumerate(draws) if draw.temperature == 0]
    if greedy:
        best = logits[greedy].argmax(dim=-1).tolist()
        for i, token_id in zip(greedy, best, strict=True):
            token_ids[i] = token_id
    drawn = [i for i, draw in enumerate(draws) if draw.temperature > 0]
    if drawn:
        chosen = [draws[i] for i in drawn]
        picked = _invert_cdf(filtered(logits[drawn], chosen), chosen)
        for i, token_id in zip(drawn, picked, strict=True):
            token_ids[i] = token_id
    return [token_id if fine else None for token_id, fine in zip(token_ids, usable, strict=True)]


def filtered(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Steps 7 to 10: logits (R, V) with -inf for what the filters drop. Temperatures above 0."""
    device, width = logits.device, logits.shape[-1]
    divisors = [draw.divisor for draw in draws]
    if any(divisor != 1 for divisor in divisors):
        logits = logits / torch.tensor(divisors, device=device)[:, None]
    if any(draw.top_k or draw.top_p < 1 for draw in draws):
        # One stable sort serves both: equals stay in the order of their ids.
        values, order = logits.sort(dim=-1, descending=True, stable=True)  # (R, V)
        top_k = torch.tensor([min(draw.top_k or width, width) for draw in draws], device=device)
        kth = values.gather(-1, top_k[:, None] - 1)  # (R, 1)
        values = values.masked_fill(values < kth, -math.inf)
        probs = values.double().softmax(dim=-1)
        top_p = torch.tensor([draw.top_p for draw in draws], device=device, dtype=torch.float64)
        likelier = probs.cumsum(dim=-1) - probs  # the mass in front of each id
        behind = (likelier >= top_p[:, None]) & (top_p[:, None] < 1)
        dropped = (values == -math.inf) | behind
        logits = logits.masked_fill(
            torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf
        )
    if any(draw.min_p for draw in draws):
        floors = torch.tensor([floor(draw) for draw in draws], device=device)[:, None]
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + floors, -math.inf)
    return logits


def floor(draw: Draw) -> float:
    """How far below the likeliest a logit may lie for min_p."""
    return math.log(draw.min_p) if draw.min_p else -math.inf


def _invert_cdf(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Step 11 on rows (R, V)."""
    cumulated = logits.double().softmax(dim=-1).cumsum(dim=-1)  # (R, V)
    total = cumulated[:, -1:].contiguous()  # (R, 1)
    uniforms = [uniform(draw.seed, draw.position, draw.index) for draw in draws]
    u = torch.tensor(uniforms, device=logits.device, dtype=torch.float64)[:, None]
    picked = torch.searchsorted(cumulated, u * total, right=True)
    last = torch.searchsorted(cumulated, total)  # u * total may round up to the total
    ids: list[int] = torch.minimum(picked, last)[:, 0].tolist()
    return ids
