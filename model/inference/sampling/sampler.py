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
11. sample             the first id, in the order of ids, at which the cumulated probability in
                       float64 exceeds u times the total; u of `model/inference/sampling/philox.py`

`raw` logprobs are log softmax of the logits as they came, `processed` of what is left after the
last step that applied (1 to 6 for temperature 0), both in float64; `rank` counts from 1 the ids
that are strictly likelier, so that equals share a rank.

A row's result depends on that row alone. Rows without penalties or filters cost nothing for them,
greedy rows an argmax. Most rows need steps 7 to 11 alone, which
`model/inference/sampling/sample.py` and the native decoder compute from the records of
`SamplingState`; only for the others is the sampler given the text (`RowContext`). Not here: stop
strings (text), and what a constraint allows where (`model/inference/constraints/compiler.py`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logitd.model.inference.sampling.params import SamplingParams, TokenLogprob
from logitd.model.inference.sampling.results import SampleError, SampleResult, TokenWithLogprobs
from logitd.model.inference.sampling.sample import (
    SampleFn,
    SamplingRows,
    filtered,
    sample_tokens,
    sampling_rows,
)
from logitd.model.inference.sampling.state import row_of


class ListedIds:
    """The lists of ids of one request, as tensors: made once, because they may be as long as the
    vocabulary and every row of every step needs them."""

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device) -> None:
        def ids(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.long, device=device)

        self.biased = ids(params.logit_bias)
        biases = list(params.logit_bias.values())
        self.biases = torch.tensor(biases, dtype=torch.float32, device=device)
        self.stops = ids(params.stop_token_ids)
        self.forbidden: Tensor | None = None  # (V,): all but allowed_token_ids
        if params.allowed_token_ids is not None:
            self.forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self.forbidden[ids(params.allowed_token_ids)] = False


@dataclass(frozen=True, slots=True)
class RowContext:
    """The sequence behind a row that needs logits processing."""

    params: SamplingParams
    listed: ListedIds
    index: int  # among the n sequences of its prompt
    tokens: list[int]  # prompt and completion so far; not changed
    prompt_length: int
    allowed: Any = None  # what its constraint lets come next: NumPy booleans (V,)


NOT_FINITE = SampleError("the model computed logits that are not finite for this sequence")


def sample(
    logits: Tensor,
    sampling: SamplingRows,
    contexts: Mapping[int, RowContext],
    sample_fn: SampleFn = sample_tokens,
) -> list[SampleResult]:
    """The next token of each row of `logits` (R, V), of any float dtype, which stay as they are.
    `contexts` has the rows that need logits processing, by index. `sample_fn` does steps 7 to
    11."""
    raw = logits if logits.dtype is torch.float32 else logits.float()  # (R, V)
    final = _biased_and_penalised(raw, contexts) if contexts else raw
    token_ids = sample_fn(final, raw, sampling)
    results = sample_results(token_ids)
    for i, row in contexts.items():
        if (token_id := token_ids[i]) is not None and row.params.logprobs is not None:
            only_i = slice(i, i + 1)
            results[i] = _with_logprobs(token_id, row, raw[only_i], final[only_i], sampling[only_i])
    return results


def sample_results(token_ids: Iterable[int | None]) -> list[SampleResult]:
    """A decoder's tokens as results: None, where a row was not finite, is an error."""
    return [NOT_FINITE if token_id is None else token_id for token_id in token_ids]


def process(logits: Tensor, contexts: Sequence[RowContext]) -> Tensor:
    """Logits (R, V) as they would be sampled from: steps 1 to 10, or 1 to 6 at temperature 0, with
    -inf for dropped ids. float32; `logits` stay as they are."""
    values = _biased_and_penalised(logits.float(), dict(enumerate(contexts)))
    random = [i for i, row in enumerate(contexts) if row.params.temperature > 0]
    if not random:
        return values
    sampling = sampling_rows(
        row_of(contexts[i].params, contexts[i].index, len(contexts[i].tokens)) for i in random
    )
    kept = filtered(values[random], sampling)
    return values.index_copy(0, torch.tensor(random, device=values.device), kept)


def _biased_and_penalised(raw: Tensor, contexts: Mapping[int, RowContext]) -> Tensor:
    """Steps 1 to 6 (R, V): `raw` itself when no row needs any. Constraints come first, for all
    rows at once: what is -inf stays so through the other steps."""
    values = raw
    if any(row.allowed is not None for row in contexts.values()):
        values = raw.masked_fill(_forbidden(contexts, raw), -math.inf)
    changed = [i for i, row in contexts.items() if _changes_logits(row)]
    if changed and values is raw:
        values = raw.clone()
    for i in changed:
        _bias_and_penalise(values[i], contexts[i])
    return values


def _changes_logits(row: RowContext) -> bool:
    """Whether a step besides the constraint applies."""
    params, generated = row.params, len(row.tokens) - row.prompt_length
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or generated < params.min_tokens
        or params.repetition_penalty != 1
        or ((params.frequency_penalty or params.presence_penalty) and generated)
    )


def _forbidden(contexts: Mapping[int, RowContext], raw: Tensor) -> Tensor:
    """What constraints do not allow: booleans (R, V)."""
    forbidden = np.zeros(raw.shape, np.bool_)
    for i, row in contexts.items():
        if row.allowed is not None:
            np.logical_not(row.allowed, out=forbidden[i])
    return torch.from_numpy(forbidden).to(raw.device)


def _bias_and_penalise(values: Tensor, row: RowContext) -> None:
    """Steps 1, 2 and 4 to 6 on one row (V,), in place."""
    params, listed, device = row.params, row.listed, values.device
    completion = row.tokens[row.prompt_length :]
    if params.logit_bias:
        values[listed.biased] += listed.biases
    if listed.forbidden is not None:
        values.masked_fill_(listed.forbidden, -math.inf)
    if len(completion) < params.min_tokens and params.stop_token_ids:
        values[listed.stops] = -math.inf
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.tokens)), device=device)
        old = values[seen]
        values[seen] = torch.where(
            old > 0, old / params.repetition_penalty, old * params.repetition_penalty
        )
    if completion and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.tensor(completion, device=device).unique(return_counts=True)
        values[ids] -= params.frequency_penalty * counts + params.presence_penalty


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """What `score` says of rows, in arrays: for whoever keeps columns of them, an object for each
    token is most of the cost. Ranks are left out.

    logprobs (R,), float64
    counts   (R,), how many of the likeliest follow in `top_ids` and `top_logprobs` (N,)
    """

    logprobs: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float64]


def score_rows(logits: Tensor, token_ids: Sequence[int], count: int) -> ScoredRows:
    """What `score` says, to the bit, without an object for each token."""
    logprobs = logits.float().double().log_softmax(dim=-1)  # (R, V)
    ids = torch.tensor(token_ids, device=logprobs.device)[:, None]  # (R, 1)
    own = logprobs.gather(1, ids)[:, 0].cpu().numpy()
    if not count:
        none = np.zeros(len(own), dtype=np.int64)
        return ScoredRows(own, none, none[:0], own[:0])
    top_ids, values, certain = _sorted_topk(logprobs, count)
    if bool((certain & (values[:, -1] > -math.inf)).all()):
        counts = np.full(len(own), count, dtype=np.int64)
        return ScoredRows(
            own, counts, top_ids.flatten().cpu().numpy(), values.flatten().cpu().numpy()
        )
    likeliest = _likeliest_of_rows(logprobs, count)
    entries = [entry for row in likeliest for entry in row]
    return ScoredRows(
        own,
        np.array([len(row) for row in likeliest], dtype=np.int64),
        np.array([entry.token_id for entry in entries], dtype=np.int64),
        np.array([entry.logprob for entry in entries], dtype=np.float64),
    )


def score(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenWithLogprobs]:
    """Raw logprobs of given tokens under rows of logits (R, V), and of the `count` likeliest of
    each row. All rows at once, with the bits of each by itself."""
    logprobs = logits.float().double().log_softmax(dim=-1)  # (R, V)
    ids = torch.tensor(token_ids, device=logprobs.device)[:, None]  # (R, 1)
    own = logprobs.gather(1, ids)  # (R, 1)
    ranks = (logprobs > own).sum(dim=1) + 1
    likeliest = _likeliest_of_rows(logprobs, count) if count else [()] * len(token_ids)
    return [
        TokenWithLogprobs(token_id, TokenLogprob(token_id, logprob, rank), top)
        for token_id, logprob, rank, top in zip(
            token_ids, own[:, 0].tolist(), ranks.tolist(), likeliest, strict=True
        )
    ]


def _with_logprobs(
    token_id: int, row: RowContext, raw: Tensor, final: Tensor, sampling: SamplingRows
) -> TokenWithLogprobs:
    """A sampled token with the logprobs that its request asks for. `raw`, `final` and `sampling`
    are one row each: (1, V), (1, V) and (1,)."""
    count, logits = row.params.logprobs, raw
    assert count is not None
    if row.params.logprobs_stage == "processed":
        logits = filtered(final, sampling) if row.params.temperature else final
    return TokenWithLogprobs(token_id, *_logprobs(logits[0], token_id, count))


def _logprobs(
    logits: Tensor, token_id: int, count: int
) -> tuple[TokenLogprob, tuple[TokenLogprob, ...]]:
    """The logprob of an id under one row (V,), and those of the `count` likeliest ids."""
    logprobs = logits.double().log_softmax(dim=-1)
    own = logprobs[token_id]
    chosen = TokenLogprob(token_id, own.item(), int((logprobs > own).sum()) + 1)
    return chosen, _likeliest(logprobs, count) if count else ()


def _likeliest_of_rows(logprobs: Tensor, count: int) -> list[tuple[TokenLogprob, ...]]:
    """What `_likeliest` gives of each row of (R, V), for all of them at once."""
    ids, values, certain = _sorted_topk(logprobs, count)
    ranks = torch.searchsorted(-values, -values) + 1
    return [
        tuple(map(TokenLogprob, row_ids, row_values, row_ranks))
        if is_certain and row_values[-1] > -math.inf
        else _likeliest(row, count)
        for row, row_ids, row_values, row_ranks, is_certain in zip(
            logprobs, ids.tolist(), values.tolist(), ranks.tolist(), certain.tolist(), strict=True
        )
    ]


def _sorted_topk(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and logprobs (R, count) of the likeliest of each row, equals in the order of their ids;
    and whether these are certain (R,): where more ids are as likely as the last, which of them topk
    gave is not known."""
    values, ids = logprobs.topk(count)  # equals in any order
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    certain = (logprobs >= values[:, -1:]).sum(dim=1) == count
    return ids.gather(1, order), values, certain


def _likeliest(logprobs: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` likeliest ids of a row (V,), equals in the order of their ids; dropped ids are
    left out."""
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
