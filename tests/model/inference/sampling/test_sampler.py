"""Sampler: each step is compared with its definition for one row, and a row gives the same result
alone and in a batch.

The definitions on plain Python numbers are in `model/inference/reference.py`. Rounding may decide
whether an id very near a filter's edge can be sampled. So the set of possible ids must contain the
set of a slightly narrower filter and be contained in the set of a slightly wider one. Each sample
must lie within the interval of its token.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.inference.reference import filtered, penalized
from logitd.model.inference.sampling.params import SamplingParams, TokenLogprob
from logitd.model.inference.sampling.philox import uniform
from logitd.model.inference.sampling.results import (
    ConstraintComplete,
    SampleError,
    SampleResult,
    ScoredToken,
)
from logitd.model.inference.sampling.sample import SamplingRow, SamplingState, sampling_rows
from logitd.model.inference.sampling.sampler import ListedIds, RowContext, sample, score, score_rows
from tests.model.inference.engine.harness import params
from tests.profiles import examples

VOCAB = 13


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A common form for all types of sampling results."""

    token_id: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()
    error: str | None = None

    @classmethod
    def of(cls, result: SampleResult) -> "Sampled":
        match result:
            case int(token_id):
                return cls(token_id)
            case ScoredToken(token_id, chosen, top):
                return cls(token_id, chosen, top)
            case SampleError(message):
                return cls(-1, error=message)
            case ConstraintComplete():
                raise AssertionError("unexpected ConstraintComplete: these rows have only masks")


def row(
    sampling: SamplingParams, prompt: Sequence[int] = (0,), *more: int, index: int = 0
) -> RowContext:
    """A row whose sequence has this prompt and then `more` generated tokens."""
    ids = ListedIds(sampling, VOCAB, torch.device("cpu"))
    return RowContext(sampling, ids, index, [*prompt, *more], len(prompt))


def listed(one: RowContext, logits: Tensor) -> RowContext:
    """A copy of the row for a vocabulary with as many ids as there are logits."""
    ids = ListedIds(one.params, logits.shape[1], logits.device)
    return dataclasses.replace(one, listed=ids)


def mask(allowed: Iterable[int]) -> np.ndarray:
    """Mask of a constraint that allows these ids."""
    return np.isin(np.arange(VOCAB), list(allowed))


def defined(logits: Sequence[float], one: RowContext) -> list[float]:
    """The logits of a row after the sampler's steps 1 to 6, by the definition."""
    allowed = None if one.allowed is None else one.allowed.tolist()
    return penalized(logits, one.tokens, one.prompt_length, one.params, allowed)


def sample_all(logits: Tensor, rows: Sequence[RowContext]) -> list[Sampled]:
    """Sample as a step does: a slot for each row, contexts for the rows that need processing."""
    slots, state = list(range(len(rows))), SamplingState(len(rows))
    for slot, one in enumerate(rows):
        state.begin(slot, one.params, one.index)
    sampling, processed = state.rows(slots, [len(one.tokens) for one in rows])
    contexts = {*processed, *(i for i in slots if rows[i].allowed is not None)}
    results = sample(logits, sampling, {i: listed(rows[i], logits) for i in sorted(contexts)})
    return [Sampled.of(result) for result in results]


def sample_one(logits: Sequence[float], one: RowContext) -> Sampled:
    return sample_all(torch.tensor([logits]), [one])[0]


def processed(logits: Sequence[float], one: RowContext) -> dict[int, float]:
    """Logprobs of the ids that can be sampled from a row, after all steps of the sampler."""
    asking = dataclasses.replace(one.params, logprobs=len(logits), logprobs_stage="processed")
    result = sample_one(logits, dataclasses.replace(one, params=asking))
    return {token.token_id: token.logprob for token in result.top}


# Strategies. Numbers are fractions that float32 holds exactly, so ties are the same in both; on the
# coarse grid ties are common.


def fractions(low: int, high: int, of: int) -> st.SearchStrategy[float]:
    return st.integers(low * of, high * of).map(lambda i: i / of)


numbers = fractions(-8, 8, of=8) | fractions(-30, 30, of=1024)
ids = st.integers(0, VOCAB - 1)


@st.composite
def sampling_params(draw: st.DrawFn, temperature: st.SearchStrategy[float]) -> SamplingParams:
    stop = draw(st.frozensets(ids, max_size=3))
    allowed = draw(st.none() | st.sets(ids, min_size=1).map(tuple))
    min_tokens = draw(st.integers(0, 8))
    assume(not (min_tokens and allowed and stop.issuperset(allowed)))
    return SamplingParams(
        max_tokens=8,
        seed=draw(st.integers(0, 2**64 - 1)),
        temperature=draw(temperature),
        top_k=draw(st.just(0) | st.integers(1, VOCAB + 3)),
        top_p=draw(st.just(1.0) | st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.just(0.0) | st.floats(0, 1)),
        repetition_penalty=draw(st.just(1.0) | fractions(1, 2, of=64) | st.just(0.5)),
        presence_penalty=draw(st.just(0.0) | fractions(-3, 3, of=64)),
        frequency_penalty=draw(st.just(0.0) | fractions(-3, 3, of=64)),
        logit_bias=draw(st.dictionaries(ids, numbers, max_size=3)),
        allowed_token_ids=allowed,
        stop_token_ids=stop,
        min_tokens=min_tokens,
        logprobs=draw(st.none() | st.integers(0, VOCAB)),
        logprobs_stage=draw(st.sampled_from(["raw", "processed"])),
    )


greedy_or_not = st.sampled_from([0.0, 0.5, 1.0, 1.3]) | st.floats(0.05, 50)


@st.composite
def rows(draw: st.DrawFn, temperature: st.SearchStrategy[float] = greedy_or_not) -> RowContext:
    one = row(
        draw(sampling_params(temperature)),
        draw(st.lists(ids, min_size=1, max_size=6)),
        *draw(st.lists(ids, max_size=6)),
        index=draw(st.integers(0, 3)),
    )
    if one.params.allowed_token_ids is not None or one.params.min_tokens:
        return one  # the reference has no constraints
    allowed = draw(st.none() | st.sets(ids, min_size=1))
    return one if allowed is None else dataclasses.replace(one, allowed=mask(allowed))


logit_rows = st.lists(numbers, min_size=VOCAB, max_size=VOCAB)
often = settings(max_examples=examples(300, fast=80))
"""Number of examples for a property that covers every parameter of the sampler."""


# Against the definitions

BEST_STOPS = [float(i == 3) for i in range(VOCAB)]
"""Logits, the largest of which belongs to stop token 3."""


def may_just_end(temperature: float) -> RowContext:
    """A row with exactly `min_tokens` generated tokens, so stop token 3 is now allowed."""
    stopping = params(temperature=temperature, stop_token_ids=frozenset({3}), min_tokens=1)
    return row(stopping, (0,), 1)


def log_softmax(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    total = math.log(sum(math.exp(x - largest) for x in logits))
    return [x - largest - total for x in logits]


def support(logits: Sequence[float], sampling: SamplingParams) -> set[int]:
    return {i for i, x in enumerate(filtered(logits, sampling)) if x > -math.inf}


@often
@given(logit_rows, rows(temperature=st.just(0.0)))
@example(BEST_STOPS, may_just_end(temperature=0.0))
def test_greedy_takes_the_largest_logit_of_the_definition(
    logits: list[float], one: RowContext
) -> None:
    expected = defined(logits, one)
    token_id = sample_one(logits, one).token_id
    assert expected[token_id] >= max(expected) - 1e-4
    left = processed(logits, one)
    assert left.keys() == {i for i, x in enumerate(expected) if x > -math.inf}
    for i, logprob in left.items():
        assert logprob == pytest.approx(log_softmax(expected)[i], abs=1e-4)
    assert left[token_id] == max(left.values())


@given(st.lists(st.integers(-2, 2), min_size=VOCAB, max_size=VOCAB))
def test_greedy_takes_the_lowest_id_among_equals(logits: list[int]) -> None:
    assert sample_one(logits, row(params())).token_id == logits.index(max(logits))


@often
@given(logit_rows, rows(temperature=st.floats(0.05, 50)))
@example(BEST_STOPS, may_just_end(temperature=1.0))
def test_filters_keep_the_ids_of_the_definition(logits: list[float], one: RowContext) -> None:
    base = defined(logits, one)
    sharp = max(abs(x) for x in base if x > -math.inf) / one.params.temperature
    hair = 1e-6 * (1 + sharp)  # float32's tolerance for a scaled logit
    # A k-th largest that rounding ties with the next one may let that one in.
    ordered = sorted((x for x in base if x > -math.inf), reverse=True)
    k = one.params.top_k
    if 0 < k < len(ordered):
        assume(ordered[k - 1] == ordered[k] or ordered[k - 1] - ordered[k] > 1e-4)

    left = processed(logits, one)
    p, q = one.params.top_p, one.params.min_p
    narrow, wide = (
        support(
            base,
            dataclasses.replace(
                one.params,
                top_p=1.0 if p == 1 else min(1.0, max(1e-300, p + side * 2 * hair)),
                min_p=min(1.0, q * (1 - side * 2 * hair)),
            ),
        )
        for side in (-1, 1)
    )
    assert narrow <= left.keys() <= wide
    # ... and their logprobs are relative to their own mass.
    scaled = {i: base[i] / one.params.temperature for i in left}
    largest = max(scaled.values())
    total = math.log(sum(math.exp(x - largest) for x in scaled.values())) + largest
    for i, logprob in left.items():
        assert logprob == pytest.approx(scaled[i] - total, abs=2 * hair + 1e-5)


@often
@given(logit_rows, rows(temperature=st.floats(0.05, 50)))
def test_sampling_inverts_the_cumulated_mass(logits: list[float], one: RowContext) -> None:
    left = processed(logits, one)
    token_id = sample_one(logits, one).token_id
    assert token_id in left
    u = uniform(one.params.seed, len(one.tokens), one.index)
    before = sum(math.exp(logprob) for i, logprob in left.items() if i < token_id)
    assert before - 1e-9 <= u <= before + math.exp(left[token_id]) + 1e-9


@pytest.mark.parametrize(
    ("u", "token_id"),
    [(0.0, 1), (0.25 - 2**-53, 1), (0.25, 2), (0.5, 4), (0.75, 6), (1 - 2**-53, 6)],
)
def test_sampling_includes_the_lower_end_of_an_interval(
    monkeypatch: pytest.MonkeyPatch, u: float, token_id: int
) -> None:
    """An interval includes its lower end but not its upper end; an id without mass has no
    interval."""
    monkeypatch.setattr("logitd.model.inference.sampling.philox.uniform", lambda *place: u)
    one = row(params(temperature=1, allowed_token_ids=(1, 2, 4, 6)))
    assert sample_one([0.0] * 8, one).token_id == token_id


extreme = st.floats(-1e30, 1e30)


@given(st.lists(extreme, min_size=VOCAB, max_size=VOCAB), st.data())
def test_sampling_the_outermost_numbers_gives_an_allowed_id(
    logits: list[float], data: st.DataObject
) -> None:
    """With the most extreme accepted parameters, sampling never overflows to NaN and never draws an
    id outside the vocabulary."""
    sampling = SamplingParams(
        max_tokens=8,
        seed=data.draw(st.integers(0, 2**64 - 1)),
        temperature=data.draw(st.sampled_from([0.0, 5e-324, 1e-5, 1.0, 1e6])),
        top_k=data.draw(st.sampled_from([0, 1, VOCAB, 2**70])),
        top_p=data.draw(st.sampled_from([5e-324, 0.5, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 5e-324, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([0.01, 1.0, 100.0])),
        presence_penalty=data.draw(st.sampled_from([-100.0, 0.0, 100.0])),
        frequency_penalty=data.draw(st.sampled_from([-100.0, 0.0, 100.0])),
        logit_bias=data.draw(st.dictionaries(ids, st.sampled_from([-1e9, 1e9]))),
        allowed_token_ids=data.draw(st.none() | st.sets(ids, min_size=1).map(tuple)),
        logprobs=VOCAB,
        logprobs_stage="processed",
    )
    result = sample_one(logits, row(sampling, [*range(VOCAB)], 3, 3, 7))
    assert result.error is None
    assert result.chosen is not None
    assert result.token_id in (sampling.allowed_token_ids or range(VOCAB))
    assert math.isfinite(result.chosen.logprob)


LOGITS = [1.0, 3.0, 2.0, 3.0, -1.0, 0.0]


def test_top_p_stops_at_the_exact_mass() -> None:
    """The properties above allow for rounding at the edge of a filter; this test does not."""
    quarters = row(params(temperature=1, top_p=0.5))
    assert set(processed([0.0, 0.0, 0.0, 0.0], quarters)) == {0, 1}


# Logprobs


def test_raw_logprobs_come_from_the_model() -> None:
    one = row(
        params(
            temperature=0.1,
            top_k=1,
            allowed_token_ids=(4,),
            logit_bias={4: 7.0},
            repetition_penalty=3.0,
            logprobs=2,
        )
    )
    expected = log_softmax(LOGITS)
    result = sample_one(LOGITS, one)
    assert result.token_id == 4
    assert result.chosen is not None
    assert (result.chosen.token_id, result.chosen.rank) == (4, 6)
    assert [(token.token_id, token.rank) for token in result.top] == [(1, 1), (3, 1)]
    for token in (result.chosen, *result.top):
        assert token.logprob == pytest.approx(expected[token.token_id])


@given(logit_rows, rows())
def test_chosen_token_ranks_as_it_does_among_the_top(logits: list[float], one: RowContext) -> None:
    everything = dataclasses.replace(one.params, logprobs=VOCAB)
    result = sample_one(logits, dataclasses.replace(one, params=everything))
    assert result.chosen in result.top
    logprobs = [token.logprob for token in result.top]
    assert logprobs == sorted(logprobs, reverse=True)
    for token in result.top:
        assert token.rank == 1 + sum(logprob > token.logprob for logprob in logprobs)


# Rows among others


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(logit_rows, rows()), min_size=1, max_size=7), st.booleans())
def test_row_is_the_same_alone_and_in_a_batch(
    batch: list[tuple[list[float], RowContext]], in_bfloat16: bool
) -> None:
    logits = torch.tensor([values for values, _ in batch])
    if in_bfloat16:
        logits = logits.bfloat16()
    together = sample_all(logits, [one for _, one in batch])
    alone = [sample_all(logits[i : i + 1], [one])[0] for i, (_, one) in enumerate(batch)]
    assert together == alone


@given(
    logits=st.lists(
        st.lists(
            st.one_of(st.integers(-2, 2).map(float), st.floats(-9, 9), st.just(-math.inf)),
            min_size=VOCAB,
            max_size=VOCAB,
        ).filter(lambda row: max(row) > -math.inf),
        min_size=1,
        max_size=5,
    ),
    count=st.integers(0, VOCAB),
    data=st.data(),
)
@settings(max_examples=examples(200))
def test_scored_rows_have_the_bits_of_each_alone_and_the_order_of_the_definition(
    logits: list[list[float]], count: int, data: st.DataObject
) -> None:
    """Ranks and the most likely ids are compared with those found in Python lists. Ties are ordered
    by id, and dropped ids are left out."""
    ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(logits), max_size=len(logits)))
    together = score(torch.tensor(logits), ids, count)
    arrays = score_rows(torch.tensor(logits), ids, count)
    likeliest = [top for scored in together for top in scored.top]
    assert arrays.logprobs.tolist() == [
        scored.chosen.logprob for scored in together if scored.chosen
    ]
    assert arrays.counts.tolist() == [len(scored.top) for scored in together]
    assert arrays.top_ids.tolist() == [top.token_id for top in likeliest]
    assert arrays.top_logprobs.tolist() == [top.logprob for top in likeliest]
    for row, token_id, scored in zip(logits, ids, together, strict=True):
        assert score(torch.tensor([row]), [token_id], count) == [scored]
        logprobs = torch.tensor(row).double().log_softmax(dim=-1).tolist()
        ranks = [1 + sum(other > logprob for other in logprobs) for logprob in logprobs]
        order = sorted(range(VOCAB), key=lambda i: (-logprobs[i], i))[:count]
        expected = [TokenLogprob(i, logprobs[i], ranks[i]) for i in order]
        assert scored.chosen == TokenLogprob(token_id, logprobs[token_id], ranks[token_id])
        assert list(scored.top) == [top for top in expected if top.logprob > -math.inf]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2e30])
@pytest.mark.parametrize("temperature", [0, 1])
def test_non_finite_row_fails_alone(bad: float, temperature: float) -> None:
    good = [
        row(params(seed=seed, temperature=seed % 2, top_p=0.9, logprobs=3)) for seed in range(3)
    ]
    broken = row(params(temperature=temperature, min_p=0.1, logprobs=3))
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = sample_all(logits[[0, 1, 3]], good)
    logits[2, 5] = bad
    first, second, failed, third = sample_all(logits, [good[0], good[1], broken, good[2]])
    assert [first, second, third] == expected
    assert failed.error is not None
    assert "not finite" in failed.error
    assert failed.chosen is None


def test_sampling_does_not_change_logits() -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    wild = params(
        temperature=0.5,
        top_k=1,
        logit_bias={0: 5.0},
        allowed_token_ids=(0, 1),
        repetition_penalty=2.0,
    )
    sample_all(logits, [row(wild), row(params())])
    assert logits.tolist() == [LOGITS, LOGITS]


def test_slot_is_sampled_for_its_current_sequence() -> None:
    """Slots are reused many times, and a step's rows are in any order."""
    state = SamplingState(3)
    for slot in range(3):
        state.begin(slot, params(temperature=0.5, top_k=4, logprobs=1), index=2)
    state.begin(1, params(seed=2**64 - 1, temperature=1, top_p=0.5, min_p=0.25), index=0)
    before = SamplingRow(0.5, 4, 1.0, 0.0, seed=0, position=8, index=2)
    now = SamplingRow(1.0, 0, 0.5, 0.25, seed=2**64 - 1, position=9, index=0)
    for further in range(2):  # the second time from the stored records
        positions = [8 + further, 9 + further, 10 + further]
        sampling, processed = state.rows([2, 1, 1], positions)
        expected = [
            dataclasses.replace(one, position=position)
            for one, position in zip((before, now, now), positions, strict=True)
        ]
        assert sampling.tolist() == sampling_rows(expected).tolist()
        assert processed == (0,)
    state.begin(2, params(temperature=1, top_p=0.5, seed=9), index=0)
    sampling, processed = state.rows([2, 1, 1], [8, 9, 10])
    assert sampling["seed"].tolist() == [9, 2**64 - 1, 2**64 - 1]
    assert processed == ()
    assert state.rows([1, 0], [3, 4])[1] == (1,)
