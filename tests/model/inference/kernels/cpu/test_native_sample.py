"""Native sampling compared with its twin: both sample the same tokens.

The two implementations add numbers in different orders, so an id within a rounding error of a
filter's edge may be inside the filter in one and outside in the other. So a token may also be the
one that the twin samples with a slightly wider or narrower filter.
"""

import ctypes
import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.philox import uniform
from logitd.model.inference.sampling.sample import SamplingRow, sample_tokens, sampling_rows
from tests.model.factories import tiny_config, tiny_gpt
from tests.profiles import examples

GREEDY = SamplingRow(0.0, 0, 1.0, 0.0, seed=1, position=2, index=0)
PLAIN = dataclasses.replace(GREEDY, temperature=1.0)
WIDTHS = (1, 7, 16, 63, 64, 65, 1000, 20_011)


def new_decoder(library: ctypes.CDLL, vocab_size: int) -> NativeDecoder:
    """A decoder that samples rows of this width."""
    gpt = tiny_gpt(tiny_config(head_dim=16, d_model=16, n_layer=1, vocab_size=vocab_size))
    cache = KVCache(gpt.config, 2, device=torch.device("cpu"), dtype=torch.float32)
    return NativeDecoder(library, gpt, cache, threads=2)


@pytest.fixture(scope="module")
def decoders(library: ctypes.CDLL) -> Iterator[dict[int, NativeDecoder]]:
    made = {width: new_decoder(library, width) for width in WIDTHS}
    yield made
    for decoder in made.values():
        decoder.close()


@st.composite
def ways(draw: st.DrawFn) -> SamplingRow:
    return SamplingRow(
        temperature=draw(st.sampled_from([0.0, 1.0, 0.7, 1e-6]) | st.floats(0.01, 100)),
        top_k=draw(st.just(0) | st.integers(1, 20) | st.integers(1, 2000)),
        top_p=draw(st.just(1.0) | st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.just(0.0) | st.floats(0, 1)),
        seed=draw(st.integers(0, 2**64 - 1)),
        position=draw(st.integers(0, 2**32 - 1)),
        index=draw(st.integers(0, 100)),
    )


@settings(max_examples=examples(300))
@given(
    width=st.sampled_from(WIDTHS),
    several=st.lists(ways(), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
    steps=st.sampled_from([0, 1, 4, 1024]),
)
def test_token_is_the_twins(
    decoders: dict[int, NativeDecoder],
    width: int,
    several: list[SamplingRow],
    seed: int,
    steps: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(several), width, generator=generator)
    if steps:  # on a grid: equals are common
        logits = (logits * steps).round() / steps
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -math.inf
    logits[:, 0] = 0.5  # something is left
    computed = torch.zeros_like(logits)
    tokens = decoders[width].sample(logits, computed, sampling_rows(several))
    for row, how, token in zip(logits, several, tokens, strict=True):
        nearby = {
            sample_tokens(
                row[None], computed[:1], sampling_rows([dataclasses.replace(how, top_p=p)])
            )[0]
            for p in (how.top_p, how.top_p * (1 - 1e-12), min(1.0, how.top_p * (1 + 1e-12)))
        }
        assert token in nearby


@pytest.mark.parametrize("spread", [0.0, 1e-7, 0.1, 1.0, 30.0, 1e20])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (0, 0.999), (50, 0.9), (3000, 0.9)])
def test_edge_of_a_nucleus_is_found(
    decoders: dict[int, NativeDecoder], spread: float, top_k: int, top_p: float
) -> None:
    """In flat rows the edge is among equal logits; in steep rows it is just below the largest
    logit. The search bisects a range of logits. Equal logits are at both ends of the vocabulary."""
    width = WIDTHS[-1]
    row = spread * torch.randn(1, width, generator=torch.Generator().manual_seed(7))
    row[0, -3:] = row[0, :3] = row.max()
    several = [
        dataclasses.replace(PLAIN, top_k=top_k, top_p=top_p, seed=seed) for seed in range(30)
    ]
    rows, sampling = row.expand(30, -1), sampling_rows(several)
    computed = torch.zeros_like(rows)
    tokens = decoders[width].sample(rows, computed, sampling)
    expected = sample_tokens(rows, computed, sampling)
    assert tokens == expected
    assert len(set(tokens)) > 1


def test_many_samples_equal_the_twins(library: ctypes.CDLL) -> None:
    """In a thousand samples of a large vocabulary, a difference in weights, sums or random numbers
    would show."""
    decoder = new_decoder(library, 20_011)
    logits = 2 * torch.randn(1, 20_011, generator=torch.Generator().manual_seed(3))
    several = [dataclasses.replace(PLAIN, seed=2**40 + i, position=i) for i in range(1000)]
    rows, sampling = logits.expand(1000, -1), sampling_rows(several)
    assert decoder.sample(rows, rows, sampling) == sample_tokens(rows, rows, sampling)
    cumulated = logits[0].double().softmax(dim=-1).cumsum(dim=-1)
    expected = [
        int(torch.searchsorted(cumulated, uniform(one.seed, one.position, 0), right=True))
        for one in several
    ]
    assert decoder.sample(rows, rows, sampling) == expected
    decoder.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2e30, -2e30])
def test_rows_that_are_not_finite_have_no_token(
    decoders: dict[int, NativeDecoder], width: int, bad: float
) -> None:
    for column in {0, width // 2, width - 1}:
        computed = torch.zeros(3, width)
        computed[1, column] = bad
        logits = torch.zeros(3, width)
        first, second, third = decoders[width].sample(
            logits, computed, sampling_rows([GREEDY, PLAIN, PLAIN])
        )
        assert (first, second) == (0, None)
        assert third is not None


def test_row_without_allowed_ids_ends_in_bounds(
    decoders: dict[int, NativeDecoder],
) -> None:
    logits, computed = torch.full((2, 65), -math.inf), torch.zeros(2, 65)
    tokens = decoders[65].sample(logits, computed, sampling_rows([GREEDY, PLAIN]))
    assert tokens == [0, 0]
