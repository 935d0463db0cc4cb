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
                       float64 exceeds u times the total; u of `model/inference/sampling/philox.py`

`raw` logprobs are log softmax of the logits as they came, `processed` of what is left after the
last step that applied (1 to 6 for temperature 0), both in float64; `rank` counts from 1 the ids
that are strictly likelier, so that equals share a rank.

A row's result depends on that row alone. Rows without penalties or filters cost nothing for them,
greedy rows an argmax. Not here: stop strings (text), and what a constraint allows where
(`model/inference/constraints/compiler.py`). Steps 7 to 11 are
`model/inference/sampling/sample.py`'s, or the native decoder's.

Most rows ask for steps 7 to 11 alone, and of these everything but the position is known when their
sequence begins to decode: `SlotDraws` keeps it, so that a step writes down positions and no more.
Only of the others the sampler is told the text (`Row`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.inference.sampling.params import SamplingParams, TokenLogprob
from model.inference.sampling.sample import DRAW, Draw, Drawing, Draws, draw_tokens, filtered, table


@dataclass(frozen=True, slots=True)
class Row:
    """What the sampler has to know of the sequence behind a row that asks for more than a draw."""

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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the rows of some slots, in this order, ask for."""

    slots: list[int]
    draws: Draws
    positions: npt.NDArray[np.uint32]  # those of `draws`: the same memory
    more: tuple[int, ...]  # places of the rows that ask for more than a draw


class SlotDraws:
    """What the sequence of each slot asks of its draws, from its first token to its last.

    From step to step most often the same sequences decode; then the table of the step before is
    given again, with other positions. A model's weights and cache have pushed everything else out
    of the processor's caches by then, so what is not touched is what is fast.
    """

    def __init__(self, slots: int) -> None:
        self._draws = np.zeros(slots, DRAW)
        self._more = [False] * slots
        self._last: _Asked | None = None

    def begin(self, slot: int, params: SamplingParams, index: int) -> None:
        """The slot's tokens are drawn like this from now on, for sequence `index` of its prompt."""
        self._draws[slot] = table([_draw(params, index, position=0)])[0]
        self._more[slot] = asks_more(params)
        self._last = None

    def of(self, slots: list[int], positions: list[int]) -> tuple[Draws, tuple[int, ...]]:
        """How the tokens at these positions of these slots are drawn, a row each, and which rows
        ask for more. The table is good until the next call."""
        last = self._last
        if last is None or last.slots != slots:
            last = self._last = self._ask(slots)
        last.positions[:] = positions
        return last.draws, last.more

    def _ask(self, slots: list[int]) -> _Asked:
        draws = self._draws[slots]
        more = tuple(place for place, slot in enumerate(slots) if self._more[slot])
        return _Asked(slots, draws, draws["position"], more)


def asks_more(params: SamplingParams) -> bool:
    """Whether rows with these parameters may need steps 1 to 6, or logprobs: then `sample` has to
    be told of each of them."""
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


Drawn = int | Sampled
"""A token of which nothing else is told, as most are; or what is."""


def sample(
    logits: Tensor,
    draws: Draws,
    rows: Mapping[int, Row],
    drawing: Drawing = draw_tokens,
) -> list[Drawn]:
    """Draw the next token of each row. logits (R, V), of any float dtype; left as they are. `rows`
    are those that ask for more than a draw, by their place. `drawing` does steps 7 to 11."""
    raw = logits if logits.dtype is torch.float32 else logits.float()  # (R, V)
    final = _biased_and_penalised(raw, rows) if rows else raw
    token_ids = drawing(final, raw, draws)
    sampled = as_drawn(token_ids)
    for i, row in rows.items():
        if (token_id := token_ids[i]) is not None and row.params.logprobs is not None:
            draw = draws[i : i + 1]
            sampled[i] = _with_logprobs(token_id, row, raw[i : i + 1], final[i : i + 1], draw)
    return sampled


def as_drawn(token_ids: Iterable[int | None]) -> list[Drawn]:
    """Tokens as they come from a decoder: None where a row could not be drawn from."""
    return [_UNUSABLE if token_id is None else token_id for token_id in token_ids]


def process(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Rows (R, V) as they would be drawn from: steps 1 to 10, or 1 to 6 at temperature 0; -inf for
    what is dropped. float32; the rows given are left as they are."""
    values = _biased_and_penalised(logits.float(), dict(enumerate(rows)))
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn:
        return values
    draws = table(_draw(rows[i].params, rows[i].index, len(rows[i].tokens)) for i in drawn)
    left = filtered(values[drawn], draws)
    return values.index_copy(0, torch.tensor(drawn, device=values.device), left)


def _biased_and_penalised(raw: Tensor, rows: Mapping[int, Row]) -> Tensor:
    """Steps 1 to 6 (R, V): `raw` itself when no row asks for any. Constraints come first, for all
    rows at once: what is -inf stays so through the other steps."""
    values = raw
    if any(row.allowed is not None for row in rows.values()):
        values = raw.masked_fill(_forbidden(rows, raw), -math.inf)
    changed = [i for i, row in rows.items() if _changes_logits(row)]
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


def _forbidden(rows: Mapping[int, Row], raw: Tensor) -> Tensor:
    """What constraints do not allow: booleans (R, V)."""
    forbidden = np.zeros(raw.shape, np.bool_)
    for i, row in rows.items():
        if row.allowed is not None:
            np.logical_not(row.allowed, out=forbidden[i])
    return torch.from_numpy(forbidden).to(raw.device)


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


def _draw(params: SamplingParams, index: int, position: int) -> Draw:
    return Draw(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        position,
        index,
    )


_UNUSABLE = Sampled(0, error="the model computed logits that are not finite for this sequence")


def _with_logprobs(token_id: int, row: Row, raw: Tensor, final: Tensor, draw: Draws) -> Sampled:
    """A drawn token, with the logprobs that its request wants. `raw`, `final` and `draw` are one
    row each: (1, V) and (1,)."""
    count, logits = row.params.logprobs, raw
    assert count is not None
    if row.params.logprobs_stage == "processed":
        logits = filtered(final, draw) if row.params.temperature else final
    return Sampled(token_id, *_logprobs(logits[0], token_id, count))


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
