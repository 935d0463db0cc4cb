"""The figures of a lens are those of `distribution.py`, equals included."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.inference.sampling.distribution import log_softmax as plain_log_softmax
from model.inference.sampling.distribution import summarise
from model.inference.sampling.lens import lens_numbers, lens_width, log_softmax, read_lens


@given(
    logits=st.lists(st.lists(st.integers(-6, 6), min_size=9, max_size=9), min_size=1, max_size=4),
    own=st.lists(st.integers(-6, 6), min_size=9, max_size=9),
    top_k=st.integers(1, 9),
    named=st.lists(st.integers(0, 8), max_size=4),
)
def test_rows_are_summaries(
    logits: list[list[int]], own: list[int], top_k: int, named: list[int]
) -> None:
    """Integers, so that there are equals: the lower id comes first, and they share a rank."""
    rows = torch.tensor(logits, dtype=torch.float32)
    last = log_softmax(torch.tensor([own] * len(rows), dtype=torch.float32))
    numbers = lens_numbers(rows, last, top_k, named).numpy()
    assert numbers.shape == (len(rows), lens_width(top_k, len(named)))
    p = np.exp(plain_log_softmax(np.array(own, dtype=np.float32)))
    for row, given_logits in zip(numbers, rows.numpy(), strict=True):
        read = read_lens(row, top_k, len(named))
        likeliest = summarise(given_logits, top_k=top_k)
        assert read.top_ids.tolist() == [token.token_id for token in likeliest.tokens]
        expected = [token.logprob for token in likeliest.tokens]
        np.testing.assert_allclose(read.top_logprobs, expected, rtol=1e-6)
        tokens = summarise(given_logits, token_ids=named).tokens if named else ()
        assert read.ranks.tolist() == [token.rank for token in tokens]
        np.testing.assert_allclose(read.logprobs, [token.logprob for token in tokens], rtol=1e-6)
        np.testing.assert_allclose(read.entropy, likeliest.entropy, rtol=1e-6, atol=1e-7)
        divergence = (p * (np.log(p) - plain_log_softmax(given_logits))).sum()
        np.testing.assert_allclose(read.divergence, divergence, rtol=1e-5, atol=1e-7)
        assert read.divergence >= 0
