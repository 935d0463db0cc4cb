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
                       float64 exceeds u times the total; u of `model/engine/philox.py`

`raw` logprobs are log softmax of the logits as they came, `processed` of what is left after the
last step that applied (1 to 6 for temperature 0), both in float64; `rank` counts from 1 the ids
that are strictly likelier, so that equals share a rank.

A row's result depends on that row alone. Rows without penalties or filters cost nothing for them,
greedy rows an argmax. Not here: stop strings (text), and what a constraint allows where
(`model/constraint.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.engine.api import SamplingParams, TokenLogprob
from model.engine.philox import uniform

LARGEST_LOGIT = 1e30
"""Up to here no step can leave float32, whatever the parameters."""


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
    """The token of one row, or the reason why there is none."""

    token_id: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()
    error: str | None = None


def sample(logits: Tensor, rows: list[Row]) -> list[Sampled]:
    """Draw the next token of each row. logits (R, V), of any float dtype; left as they are."""
    raw = logits.float()  # (R, V)
    usable = (raw.abs().amax(dim=-1) <= LARGEST_LOGIT).tolist()  # NaN fails it too
    final = list(_biased_and_penalised(raw, rows))
    token_ids = [0] * len(rows)
    greedy = [i for i, row in enumerate(rows) if row.params.temperature == 0]
    if greedy:
        best = torch.stack([final[i] for i in greedy]).argmax(dim=-1).tolist()
        for i, token_id in zip(greedy, best, strict=True):
            token_ids[i] = token_id
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        left = filtered(torch.stack([final[i] for i in drawn]), [rows[i].params for i in drawn])
        picked = _invert_cdf(left, [_uniform(rows[i]) for i in drawn])
        for i, values, token_id in zip(drawn, left, picked, strict=True):
            final[i], token_ids[i] = values, token_id
    return [
        _result(row, token_ids[i], raw[i], final[i])
        if usable[i]
        else Sampled(0, error="the model computed logits that are not finite for this sequence")
        for i, row in enumerate(rows)
    ]


def process(logits: Tensor, rows: list[Row]) -> Tensor:
    """Rows (R, V) as they would be drawn from: steps 1 to 9, or 1 to 5 at temperature 0; -inf for
    what is dropped. float32; the rows given are left as they are."""
    values = _biased_and_penalised(logits.float(), rows)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn:
        return values
    left = filtered(values[drawn], [rows[i].params for i in drawn])
    return values.index_copy(0, torch.tensor(drawn, device=values.device), left)


def filtered(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Steps 7 to 10: logits (R, V) with -inf for what the filters drop. Temperatures above 0."""
    device, width = logits.device, logits.shape[-1]
    # Colder than 1e-5 is greedy in all but name, and would overflow.
    temperature = [max(p.temperature, 1e-5) for p in params]
    if any(t != 1 for t in temperature):
        logits = logits / torch.tensor(temperature, device=device)[:, None]
    if any(p.top_k or p.top_p < 1 for p in params):
        # One stable sort serves both: equals stay in the order of their ids.
        values, order = logits.sort(dim=-1, descending=True, stable=True)  # (R, V)
        top_k = torch.tensor([min(p.top_k or width, width) for p in params], device=device)
        kth = values.gather(-1, top_k[:, None] - 1)  # (R, 1)
        values = values.masked_fill(values < kth, -math.inf)
        probs = values.double().softmax(dim=-1)
        top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)[:, None]
        likelier = probs.cumsum(dim=-1) - probs  # the mass in front of each id
        dropped = (values == -math.inf) | ((likelier >= top_p) & (top_p < 1))
        logits = logits.masked_fill(
            torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf
        )
    if any(p.min_p for p in params):
        least = [math.log(p.min_p) if p.min_p else -math.inf for p in params]  # drops nothing
        floor = logits.amax(dim=-1, keepdim=True) + torch.tensor(least, device=device)[:, None]
        logits = logits.masked_fill(logits < floor, -math.inf)
    return logits


def _biased_and_penalised(raw: Tensor, rows: list[Row]) -> Tensor:
    """Steps 1 to 6 (R, V): `raw` itself when no row asks for any."""
    changed = [i for i, row in enumerate(rows) if _changes_logits(row)]
    if not changed:
        return raw
    values = raw.clone()
    for i in changed:
        _bias_and_penalise(values[i], rows[i])
    return values


def _changes_logits(row: Row) -> bool:
    params, generated = row.params, len(row.tokens) - row.prompt_length
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or row.allowed is not None
        or generated < params.min_tokens
        or params.repetition_penalty != 1
        or ((params.frequency_penalty or params.presence_penalty) and generated)
    )


def _bias_and_penalise(values: Tensor, row: Row) -> None:
    """Steps 1 to 6 on one row (V,), in place."""
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
    if row.allowed is not None:
        values.masked_fill_(torch.from_numpy(~row.allowed).to(device), -math.inf)
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


def _uniform(row: Row) -> float:
    return uniform(row.params.seed, len(row.tokens), row.index)


def _invert_cdf(logits: Tensor, draws: list[float]) -> list[int]:
    """Step 11 on rows (R, V)."""
    cumulated = logits.double().softmax(dim=-1).cumsum(dim=-1)  # (R, V)
    total = cumulated[:, -1:].contiguous()  # (R, 1)
    u = torch.tensor(draws, device=logits.device, dtype=torch.float64)[:, None]
    picked = torch.searchsorted(cumulated, u * total, right=True)
    last = torch.searchsorted(cumulated, total)  # u * total may round up to the total
    ids: list[int] = torch.minimum(picked, last)[:, 0].tolist()
    return ids


def score(logits: Tensor, token_ids: Sequence[int], count: int) -> list[Sampled]:
    """Raw logprobs of given tokens under rows (R, V), and of the `count` likeliest of each."""
    return [
        Sampled(token_id, *_logprobs(row, token_id, count))
        for row, token_id in zip(logits.float(), token_ids, strict=True)
    ]


def _result(row: Row, token_id: int, raw: Tensor, final: Tensor) -> Sampled:
    count = row.params.logprobs
    if count is None:
        return Sampled(token_id)
    logits = raw if row.params.logprobs_stage == "raw" else final
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
