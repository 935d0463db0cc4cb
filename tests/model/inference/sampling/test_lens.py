"""The numbers that a lens computes from rows of logits, compared with the definitions in
`distribution.py` and with an oracle in NumPy's float64."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.inference.sampling import lens as under_test
from logitd.model.inference.sampling.distribution import largest, log_softmax, summarize
from logitd.model.inference.sampling.lens import LensDigest, LensRow, lens_width, read_lens
from logitd.model.inference.sampling.sampler import score
from tests.profiles import examples


def lens_of(
    logits: Tensor, own: Tensor, top_k: int, token_ids: tuple[int, ...] = ()
) -> list[LensRow]:
    numbers = LensDigest(own, top_k, token_ids).numbers(logits)
    assert numbers.dtype is torch.float32
    assert numbers.shape == (len(logits), lens_width(top_k, len(token_ids)))
    return [read_lens(row, top_k, len(token_ids)) for row in numbers.numpy()]


def divergence(own: npt.NDArray[Any], logits: npt.NDArray[Any]) -> float:
    p, q = log_softmax(own), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum())


def check(logits: Tensor, own: Tensor, top_k: int, token_ids: tuple[int, ...]) -> None:
    """Check every number of each row's lens against its definition."""
    for read, row, own_row in zip(
        lens_of(logits, own, top_k, token_ids), logits.numpy(), own.numpy(), strict=True
    ):
        _, *named = summarize(row, token_ids=(0, *token_ids)).tokens
        logprobs, likeliest = log_softmax(row), summarize(row, top_k=top_k)
        assert read.top_ids.tolist() == largest(row, top_k).tolist()
        np.testing.assert_allclose(read.top_logprobs, logprobs[read.top_ids], rtol=1e-6, atol=1e-12)
        expected = [token.logprob for token in named]
        np.testing.assert_allclose(read.logprobs, expected, rtol=1e-6, atol=1e-12)
        assert read.ranks.tolist() == [token.rank for token in named]
        assert read.entropy == pytest.approx(likeliest.entropy, rel=1e-6, abs=1e-9)
        assert read.divergence == pytest.approx(divergence(own_row, row), rel=1e-6, abs=1e-9)
        assert read.divergence >= 0
        assert read.entropy >= 0


@settings(max_examples=examples(60))
@given(data=st.data())
def test_lens_of_rows_matches_the_definitions(data: st.DataObject) -> None:
    """Logits have few distinct values, so ties are likely."""
    width = data.draw(st.integers(1, 40))
    rows = data.draw(st.integers(1, 5))
    steps = data.draw(st.sampled_from([1, 2, 5, 1000]))
    scale = data.draw(st.sampled_from([0.01, 1.0, 30.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits, own = (
        torch.from_numpy((scale * rng.integers(0, steps, (rows, width)) / steps).astype(np.float32))
        for _ in range(2)
    )
    named = data.draw(st.lists(st.integers(0, width - 1), max_size=20).map(tuple))
    check(logits, own, data.draw(st.integers(1, width)), named)


def test_lens_of_a_large_vocabulary_is_as_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are computed in groups of three, and the last group has a single row."""
    monkeypatch.setattr(under_test, "GROUP_ELEMENTS", 3 * 50_257)
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(4, 50_257, generator=generator)
    own = logits + 0.5 * torch.randn(4, 50_257, generator=generator)
    check(logits, own, 7, (3, 50_256, 3))


def test_small_divergence_is_not_lost_in_the_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(1, 50_257, generator=generator)
    logits = own + 1e-4 * torch.randn(1, 50_257, generator=generator)
    exact = divergence(own[0].numpy(), logits[0].numpy())
    assert 0 < exact < 1e-7
    (read,) = lens_of(logits, own, 1)
    assert read.divergence == pytest.approx(exact, rel=1e-4)


def test_row_has_the_same_bits_alone_as_among_others() -> None:
    torch.set_num_threads(2)  # a sum may be divided between them
    generator = torch.Generator().manual_seed(1)
    logits, own = (5 * torch.randn(5, 50_257, generator=generator) for _ in range(2))
    together = LensDigest(own, 5, (1, 2))
    sums = together._sums(logits, together._probs)  # in float64, before they are rounded
    numbers = together.numbers(logits)
    for row in range(5):
        alone = LensDigest(own[row : row + 1], 5, (1, 2))
        single = alone._sums(logits[row : row + 1], alone._probs)
        assert single.entropy == sums.entropy[row]
        assert single.weighted == sums.weighted[row]
        assert torch.equal(alone.numbers(logits[row : row + 1])[0], numbers[row])


def test_following_token_has_the_bits_of_a_score_at_the_last_layer() -> None:
    """Some rows have a logprob near the middle between two float32 numbers, so that the order of a
    float64 sum decides the rounding."""
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(2000, 60, generator=generator)
    logits[:, 0] = 0  # near 0, logits can be set precisely
    for _ in range(3):
        total = logits.double().logsumexp(dim=-1)
        rounded = (-total).float()
        middle = (rounded.double() + torch.nextafter(rounded, torch.zeros(())).double()) / 2
        logits[:, 0] = (middle + total).float()
    digest = LensDigest(logits, 1, (), torch.zeros(2000, dtype=torch.int64))
    figures = digest.numbers(logits)
    scored = [token.chosen for token in score(logits, [0] * 2000, 0) if token.chosen is not None]
    logprobs = np.array([token.logprob for token in scored])
    assert np.array_equal(figures[:, 2].numpy(), logprobs.astype(np.float32))
    assert figures[:, 3].tolist() == [token.rank for token in scored]
    # With the digest's sums, as for other layers, some are rounded to the adjacent number.
    by_sums = LensDigest(logits, 1, (0,)).numbers(logits)[:, 2].numpy()
    assert not np.array_equal(by_sums, figures[:, 2].numpy())
    other = LensDigest(torch.zeros(2000, 60), 1, (), torch.zeros(2000, dtype=torch.int64))
    assert np.array_equal(other.numbers(logits)[:, 2].numpy(), by_sums)


def test_lens_of_rows_that_are_not_finite_is_nan() -> None:
    logits = torch.zeros(3, 10)
    logits[0, 3], logits[2] = torch.inf, torch.nan
    first, second, third = lens_of(logits, torch.zeros(3, 10), 2, (1,))
    for read in (first, third):
        assert np.isnan([read.entropy, read.divergence, *read.logprobs]).all()
        assert ((read.top_ids >= 0) & (read.top_ids < 10)).all()
    assert second.entropy == pytest.approx(np.log(10))
