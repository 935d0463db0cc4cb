"""Sampler: from a row of logits to a token, for all rows of a step at once.

The definitions, in the order in which they are applied:

1. logit_bias          l[i] += bias[i]                                            (OpenAI API)
2. allowed_token_ids   l[i] = -inf for every other id
3. constraint          l[i] = -inf for every id that its matcher does not allow here
4. min_tokens          l[i] = -inf for stop tokens while fewer were generated
5. repetition_penalty  l[i] = l[i] / r if l[i] > 0 else l[i] * r, for ids in the prompt or the
                       completion so far                            (Keskar et al., 2019, CTRL)
6. frequency_penalty, presence_penalty
                       l[i] -= f * count[i] + p * (count[i] > 0), counts of the completion so far
                                                                                   (OpenAI API)
   temperature 0: the token is argmax l, the lowest id among equals; what follows is skipped
7. temperature         l[i] /= t
8. top_k               keep l[i] >= the k-th largest (ties are all kept)      (Fan et al., 2018)
9. top_p               of what is left, keep the likeliest ids, equals by id, until their mass
                       reaches p                                        (Holtzman et al., 2020)
10. min_p              of what is left, keep prob[i] >= min_p * the largest   (Nguyen et al., 2024)
11. draw               the first id, in the order of ids, at which the cumulated probability in
                       float64 exceeds u times the total; u of `model/philox.py`

`raw` logprobs are log softmax of the logits as they came, `processed` of what is left after the
last step that applied (1 to 6 for temperature 0), both in float64; `rank` counts from 1 the ids
that are strictly likelier, so that equals share a rank.

A row's result depends on that row alone. Rows without penalties or filters cost nothing for them,
greedy rows an argmax. Not here: stop strings (text), and what a constraint allows where
(`model/constraint.py`). Steps 7 to 11 are `model/draw.py`'s, or the native decoder's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.draw import Draw, Drawing, draw_tokens, filtered
from model.engine.api import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Row:
    """What the sampler has to know of the sequence behind a row of logits."""

    params: SamplingParams
    index: int  # among the n sequences of its prompt
    tokens: list[int]  # prompt and completion so far; not changed
    prompt_length: int
    allowed: Any = None  # what its constraint lets come next: NumPy booleans (V,)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one row, or the reason why there is none: an error, with the field of the
    request that it comes from, or that the text was whole already."""

    token_id: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    param: str | None = None
    whole: bool = False


def sample(logits: Tensor, rows: list[Row], drawing: Drawing = draw_tokens) -> list[Sampled]:
    """Draw the next token of each row. logits (R, V), of any float dtype; left as they are.
    `drawing` does steps 7 to 11."""
    raw = logits.float()  # (R, V)
    final = _biased_and_penalised(raw, rows)
    draws = [_draw(row) for row in rows]
    token_ids = drawing(final, raw, draws)
    return [
        _unusable()
        if token_id is None
        else Sampled(token_id)
        if row.params.logprobs is None
        else _with_logprobs(token_id, row, raw[i], final[i], draws[i])
        for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
    ]


def process(logits: Tensor, rows: list[Row]) -> Tensor:
    """Rows (R, V) as they would be drawn from: steps 1 to 10, or 1 to 6 at temperature 0; -inf for
    what is dropped. float32; the rows given are left as they are."""
    values = _biased_and_penalised(logits.float(), rows)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn:
        return values
    left = filtered(values[drawn], [_draw(rows[i]) for i in drawn])
    return values.index_copy(0, torch.tensor(drawn, device=values.device), left)


def _biased_and_penalised(raw: Tensor, rows: list[Row]) -> Tensor:
    """Steps 1 to 6 (R, V): `raw` itself when no row asks for any. Constraints come first, for all
    rows at once: what is -inf stays so through the other steps."""
    values = raw
    if any(row.allowed is not None for row in rows):
        values = raw.masked_fill(_forbidden(rows, raw), -math.inf)
    changed = [i for i, row in enumerate(rows) if _changes_logits(row)]
    if changed and values is raw:
        values = raw.clone()
    for i in changed:
        _bias_and_penalise(values[i], rows[i])
    return values


def _changes_logits(row: Row) -> bool:
    """Whether a step besides the constraint applies."""
    params, generated = row.params, len(row.tokens) - row.prompt_length
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or generated < params.min_tokens
        or params.repetition_penalty != 1
        or ((params.frequency_penalty or params.presence_penalty) and generated)
    )


def _forbidden(rows: list[Row], raw: Tensor) -> Tensor:
    """What constraints do not allow: booleans (R, V)."""
    anything = np.ones(raw.shape[-1], np.bool_)
    allowed = np.stack([anything if row.allowed is None else row.allowed for row in rows])
    return torch.from_numpy(~allowed).to(raw.device)


def _bias_and_penalise(values: Tensor, row: Row) -> None:
    """Steps 1, 2 and 4 to 6 on one row (V,), in place."""
    params, device = row.params, values.device
    completion = row.tokens[row.prompt_length :]
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        values[ids] += torch.tensor(
            list(params.logit_bias.values()), device=device, dtype=values.dtype
        )
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=device)
        kept = values[allowed]
        values.fill_(-math.inf)
        values[allowed] = kept
    if len(completion) < params.min_tokens and params.stop_token_ids:
        values[torch.tensor(sorted(params.stop_token_ids), device=device)] = -math.inf
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.tokens)), device=device)
        old = values[seen]
        values[seen] = torch.where(
            old > 0, old / params.repetition_penalty, old * params.repetition_penalty
        )
    if completion and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.tensor(completion, device=device).unique(return_counts=True)
        values[ids] -= params.frequency_penalty * counts + params.presence_penalty


def score(logits: Tensor, token_ids: Sequence[int], count: int) -> list[Sampled]:
    """Raw logprobs of given tokens under rows (R, V), and of the `count` likeliest of each."""
    return [
        Sampled(token_id, *_logprobs(row, token_id, count))
        for row, token_id in zip(logits.float(), token_ids, strict=True)
    ]


def _draw(row: Row) -> Draw:
    params = row.params
    return Draw(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        len(row.tokens),
        row.index,
    )


def _unusable() -> Sampled:
    return Sampled(0, error="the model computed logits that are not finite for this sequence")


def _with_logprobs(token_id: int, row: Row, raw: Tensor, final: Tensor, draw: Draw) -> Sampled:
    """A drawn token, with the logprobs that its request wants."""
    count, logits = row.params.logprobs, raw
    assert count is not None
    if row.params.logprobs_stage == "processed":
        logits = filtered(final[None], [draw])[0] if draw.temperature else final
    return Sampled(token_id, *_logprobs(logits, token_id, count))


def _logprobs(
    logits: Tensor, token_id: int, count: int
) -> tuple[TokenLogprob, tuple[TokenLogprob, ...]]:
    """The logprob of an id under one row (V,), and those of the `count` likeliest ids."""
    logprobs = logits.double().log_softmax(dim=-1)
    own = logprobs[token_id]
    chosen = TokenLogprob(token_id, own.item(), int((logprobs > own).sum()) + 1)
    return chosen, _likeliest(logprobs, count) if count else ()


def _likeliest(logprobs: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` likeliest ids of a row (V,), equals in the order of their ids; not those that
    were dropped."""
    # Whatever is at least the count-th largest, equals included, in a stable sort of those alone.
    threshold = logprobs.topk(count).values[-1]
    candidates = (logprobs >= threshold).nonzero()[:, 0]
    values, order = logprobs[candidates].sort(descending=True, stable=True)
    ids, values = candidates[order][:count], values[:count]
    ranks = torch.searchsorted(-values, -values) + 1
    return tuple(
        TokenLogprob(i, value, rank)
        for i, value, rank in zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
        if value > -math.inf
    )
