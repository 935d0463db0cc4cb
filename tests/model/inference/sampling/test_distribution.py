"""Distribution: probability, logprob, rank, entropy and mass, against their definitions in exact
arithmetic or in Python's own floats.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logitd.model.inference.sampling.distribution import largest, log_softmax, summarize

LOGIT = st.integers(-3200, 3200).map(lambda i: i / 64) | st.sampled_from(
    [0.0, 1.0]
)  # includes ties
ROW = st.lists(LOGIT, min_size=1, max_size=40)


def softmax(row: Sequence[float]) -> list[float]:
    """Softmax by its definition."""
    weights = [math.exp(x - max(row)) for x in row]
    return [weight / math.fsum(weights) for weight in weights]


@given(ROW)
@example([0.0])
@example([1e4, -1e4])
@example([88.8] * 3)
def test_log_softmax_is_the_logarithm_of_the_softmax(row: list[float]) -> None:
    logprobs = log_softmax(np.array(row, dtype=np.float32))
    assert logprobs.dtype == np.float64
    assert math.fsum(np.exp(logprobs)) == pytest.approx(1, abs=1e-12)
    for logprob, prob in zip(logprobs, softmax(row), strict=True):
        assert math.exp(logprob) == pytest.approx(prob, abs=1e-12)
    assert np.allclose(np.diff(logprobs), np.diff(np.array(row, dtype=np.float64)), atol=1e-9)


@given(ROW, st.integers(1, 50))
def test_largest_are_the_first_of_a_stable_sort(row: list[float], count: int) -> None:
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert largest(np.array(row, dtype=np.float32), count).tolist() == expected


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_largest_of_a_large_row_are_stable_with_many_equals(dtype: type) -> None:
    row: npt.NDArray[Any] = np.random.default_rng(0).integers(0, 50, size=50_257).astype(dtype)
    expected = np.argsort(-row.astype(np.float64), kind="stable")
    for count in (1, 10, 5000, 50_257):
        assert np.array_equal(largest(row, count), expected[:count])


@given(ROW, st.integers(1, 40))
def test_summary_has_the_likeliest_ids_mass_and_entropy(row: list[float], top_k: int) -> None:
    values = np.array(row, dtype=np.float32)
    summary = summarize(values, top_k=top_k)
    probs = softmax(row)
    assert [token.token_id for token in summary.tokens] == largest(values, top_k).tolist()
    for token in summary.tokens:
        assert token.prob == pytest.approx(probs[token.token_id], abs=1e-12)
        assert math.exp(token.logprob) == pytest.approx(token.prob)
        assert token.rank == 1 + sum(x > row[token.token_id] for x in row)
    assert summary.mass == pytest.approx(math.fsum(t.prob for t in summary.tokens), abs=1e-12)
    entropy = -math.fsum(p * math.log(p) for p in probs if p > 0)
    assert summary.entropy == pytest.approx(entropy, abs=1e-9)


@given(ROW, st.data())
def test_summary_has_the_named_ids_in_order(row: list[float], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=10))
    summary = summarize(np.array(row, dtype=np.float32), token_ids=ids)
    probs = softmax(row)
    assert [token.token_id for token in summary.tokens] == ids, "in the order given"
    assert summary.mass == pytest.approx(math.fsum(probs[i] for i in set(ids)), abs=1e-12)
    assert summary.mass <= 1 + 1e-12


def test_summary_has_plain_python_numbers() -> None:
    """The numbers go into JSON as they are."""
    summary = summarize(np.array([1, 2], dtype=np.float32), top_k=1)
    (token,) = summary.tokens
    kinds = (token.token_id, token.prob, token.logprob, token.rank, summary.mass, summary.entropy)
    assert [type(value) for value in kinds] == [int, float, float, int, float, float]


def test_tiny_probabilities_do_not_vanish_from_their_logarithms() -> None:
    summary = summarize(np.array([1000.0, 0.0], dtype=np.float32), token_ids=[1])
    (token,) = summary.tokens
    assert token.logprob == -1000
    assert token.prob == 0
    assert summary.entropy == 0
