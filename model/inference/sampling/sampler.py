"""Sampler: turns rows of logits into tokens, for all rows of a step together.

The definitions, in the order in which they are applied:

1. logit_bias          l[i] += bias[i]                                            (OpenAI API)
2. allowed_token_ids   l[i] = -inf for every other id
3. constraint          l[i] = -inf for every id that its matcher does not allow here
4. min_tokens          l[i] = -inf for stop tokens while fewer than min_tokens were generated
5. repetition_penalty  l[i] = l[i] / r if l[i] > 0 else l[i] * r, for ids in the prompt or the
                       completion so far                            (Keskar et al., 2019, CTRL)
6. frequency_penalty, presence_penalty
                       l[i] -= f * count[i] + p * (count[i] > 0), counts of the completion so far
                                                                                   (OpenAI API)
   temperature 0: the token is argmax l, the lowest id of a tie; steps 7 to 11 are skipped
7. temperature         l[i] /= t
8. top_k               keep l[i] >= the k-th largest (ties are all kept)      (Fan et al., 2018)
9. top_p               of the rest, keep the most likely ids until their mass reaches p; ties are
                       ordered by id                                    (Holtzman et al., 2020)
10. min_p              of the rest, keep prob[i] >= min_p * the largest       (Nguyen et al., 2024)
11. sample             the first id, in ascending order, at which the cumulative probability in
                       float64 exceeds u times the total, with u from
                       `model/inference/sampling/philox.py`

Logprobs are the log softmax in float64: `raw` of the model's logits, `processed` of the logits
after step 10 (after step 6 at temperature 0). `rank` is 1 plus the number of strictly more likely
ids, so ties share a rank.

A row's result depends on that row alone. Most rows need only steps 7 to 11, which
`model/inference/sampling/sample.py` and the native decoder compute from the records of
`SamplingState`. For the other rows the sampler gets the text (`RowContext`). The sampler does not
handle stop strings, and the masks of a constraint come from its matcher
(`model/inference/constraints/compiler.py`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitd.model.inference.sampling.distribution import largest_ids
from logitd.model.inference.sampling.params import SamplingParams, TokenLogprob
from logitd.model.inference.sampling.results import (
    SampleError,
    SampleResult,
    ScoredRows,
    ScoredToken,
)
from logitd.model.inference.sampling.sample import (
    LARGEST_LOGIT,
    SampleFn,
    SamplingRows,
    filtered,
    row_of,
    sample_tokens,
    sampling_rows,
)


class ListedIds:
    """The lists of ids in a request's parameters, as tensors. They are created once per request,
    because every row of the request needs them in every step and they may be as long as the
    vocabulary."""

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device) -> None:
        def ids(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.long, device=device)

        self.biased = ids(params.logit_bias)
        biases = list(params.logit_bias.values())
        self.biases = torch.tensor(biases, dtype=torch.float32, device=device)
        self.stops = ids(params.stop_token_ids)
        self.forbidden: Tensor | None = None  # (V,): true except for allowed_token_ids
        if params.allowed_token_ids is not None:
            self.forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self.forbidden[ids(params.allowed_token_ids)] = False


@dataclass(frozen=True, slots=True)
class RowContext:
    """The parameters and tokens of a sequence whose row needs logits processing."""

    params: SamplingParams
    listed: ListedIds
    index: int  # index of the sequence among the n of its prompt
    tokens: list[int]  # prompt and completion so far; not changed
    prompt_length: int
    allowed: Any = None  # the mask of its constraint: NumPy booleans (V,)


NOT_FINITE = SampleError(
    f"a logit that the model computed for this sequence is not finite, or beyond ±{LARGEST_LOGIT:g}"
)
"""The error of a sequence with a row of logits that is not `usable`."""


def sample(
    logits: Tensor,
    sampling: SamplingRows,
    contexts: Mapping[int, RowContext],
    sample_fn: SampleFn = sample_tokens,
) -> list[SampleResult]:
    """Sample the next token of each row of `logits` (R, V), of any float dtype. `contexts` maps the
    index of each row that needs logits processing to its context. `sample_fn` computes steps 7 to
    11. `logits` stay unchanged."""
    raw = logits if logits.dtype is torch.float32 else logits.float()  # (R, V)
    final = _biased_and_penalized(raw, contexts) if contexts else raw
    token_ids = sample_fn(final, raw, sampling)
    results = sample_results(token_ids)
    for i, row in contexts.items():
        token_id, count = token_ids[i], row.params.logprobs
        if token_id is not None and count is not None:
            only_i = slice(i, i + 1)
            scored = raw[only_i]
            if row.params.logprobs_stage == "processed":
                scored = final[only_i]
                if row.params.temperature:
                    scored = filtered(scored, sampling[only_i])
            results[i] = score(scored, [token_id], count)[0]
    return results


def sample_results(token_ids: Iterable[int | None]) -> list[SampleResult]:
    """The results for a decoder's tokens. None marks a row that is not finite and becomes an
    error."""
    return [NOT_FINITE if token_id is None else token_id for token_id in token_ids]


def process(logits: Tensor, contexts: Sequence[RowContext]) -> Tensor:
    """Logits (R, V) in float32 after steps 1 to 10, or 1 to 6 at temperature 0; -inf for dropped
    ids. `logits` stay unchanged."""
    values = _biased_and_penalized(logits.float(), dict(enumerate(contexts)))
    random = [i for i, row in enumerate(contexts) if row.params.temperature > 0]
    if not random:
        return values
    sampling = sampling_rows(
        row_of(contexts[i].params, contexts[i].index, len(contexts[i].tokens)) for i in random
    )
    kept = filtered(values[random], sampling)
    return values.index_copy(0, torch.tensor(random, device=values.device), kept)


def _biased_and_penalized(raw: Tensor, contexts: Mapping[int, RowContext]) -> Tensor:
    """Logits (R, V) after steps 1 to 6; `raw` itself if none applies."""
    values = raw
    # Constraints come first, for all rows together: -inf stays -inf in the other steps.
    if any(row.allowed is not None for row in contexts.values()):
        values = raw.masked_fill(_forbidden(contexts, raw), -math.inf)
    changed = [i for i, row in contexts.items() if _changes_logits(row)]
    if changed and values is raw:
        values = raw.clone()
    for i in changed:
        _bias_and_penalize(values[i], contexts[i])
    return values


def _changes_logits(row: RowContext) -> bool:
    """True if any of steps 1 to 6 except the constraint applies."""
    params, generated = row.params, len(row.tokens) - row.prompt_length
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or generated < params.min_tokens
        or params.repetition_penalty != 1
        or ((params.frequency_penalty or params.presence_penalty) and generated)
    )


def _forbidden(contexts: Mapping[int, RowContext], raw: Tensor) -> Tensor:
    """Booleans (R, V), true for ids that the row's constraint forbids."""
    forbidden = np.zeros(raw.shape, np.bool_)
    for i, row in contexts.items():
        if row.allowed is not None:
            np.logical_not(row.allowed, out=forbidden[i])
    return torch.from_numpy(forbidden).to(raw.device)


def _bias_and_penalize(values: Tensor, row: RowContext) -> None:
    """Apply steps 1, 2 and 4 to 6 to one row (V,), in place."""
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


def score(logits: Tensor, token_ids: Sequence[int], count: int) -> list[ScoredToken]:
    """Logprobs of one given token per row of logits (R, V), and of the `count` most likely ids of
    each row. Ties are ordered by id. The bits of a row do not depend on other rows."""
    logprobs, own = _logprobs(logits, token_ids)
    ranks = (logprobs > own).sum(dim=1) + 1
    ids = largest_ids(logprobs, count)
    values = logprobs.gather(1, ids)
    top_ranks = torch.searchsorted(-values, -values) + 1
    tops = zip(ids.tolist(), values.tolist(), top_ranks.tolist(), strict=True)
    return [
        ScoredToken(
            token_id,
            TokenLogprob(token_id, logprob, rank),
            tuple(
                TokenLogprob(*likely)
                for likely in zip(*top, strict=True)
                if likely[1] > -math.inf  # not dropped
            ),
        )
        for token_id, logprob, rank, top in zip(
            token_ids, own[:, 0].tolist(), ranks.tolist(), tops, strict=True
        )
    ]


def score_rows(logits: Tensor, token_ids: Sequence[int], count: int) -> ScoredRows:
    """The same logprobs as `score`, in arrays and without ranks."""
    logprobs, own = _logprobs(logits, token_ids)
    ids = largest_ids(logprobs, count)
    values = logprobs.gather(1, ids)
    kept = values > -math.inf  # not dropped
    arrays = own[:, 0], kept.sum(dim=1), ids[kept], values[kept]
    return ScoredRows(*(array.cpu().numpy() for array in arrays))


def _logprobs(logits: Tensor, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logprobs (R, V) in float64, and the logprob of the given id of each row (R, 1)."""
    logprobs = logits.float().double().log_softmax(dim=-1)
    ids = torch.tensor(token_ids, device=logprobs.device)[:, None]
    return logprobs, logprobs.gather(1, ids)
