"""Compressed matrices: the native code and the plain reader restore every bit, and products have
the same bits as without compression."""

import ctypes

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.inference.kernels.cpu.compress import (
    CompressedMatrix,
    compress_matrix,
    decompress_matrix,
    most_bytes,
)
from tests.model.inference.kernels.cpu.plain_forms import decompressed
from tests.model.inference.kernels.cpu.test_linear import native, placed_matrix
from tests.profiles import examples

ROWS = st.one_of([st.integers(last - 2, last) for last in (32, 64, 96, 160)])
WIDTHS = st.one_of([st.integers(last - 2, last) for last in (64, 128, 512, 608)])
"""Widths that need little padding to fill whole strips and steps. With a lot of padding,
compression would not be worthwhile."""


@pytest.fixture(autouse=True)
def needs_tiles(library: ctypes.CDLL) -> None:
    if not library.logitd_has_tiles():
        pytest.skip("the processor or the target of the kernels has no AMX")


def normal(rows: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(rows, width, generator=generator)).bfloat16()


def odd_ones(weights: Tensor, share: float, seed: int, largest: int = 120) -> Tensor:
    """Replace a share of the weights with numbers of random bits whose exponent field is at most
    `largest`. They include zeros of both signs and subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    signs, exponents, fractions = (
        torch.randint(0, count, weights.shape, generator=generator)
        for count in (2, largest + 1, 128)
    )
    bits = (signs << 15 | exponents << 7 | fractions).to(torch.uint16)
    chosen = torch.rand(weights.shape, generator=generator) < share
    return torch.where(chosen, bits.view(torch.bfloat16), weights)


def compressed(library: ctypes.CDLL, weights: Tensor) -> CompressedMatrix | None:
    room = torch.zeros(most_bytes(*weights.shape) + 64, dtype=torch.uint8)
    return compress_matrix(library, weights, room[-room.data_ptr() % 64 :])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@given(
    rows=ROWS,
    width=WIDTHS,
    share=st.sampled_from([0, 0.001, 0.02, 0.05]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_bit_is_restored(
    library: ctypes.CDLL, rows: int, width: int, share: float, seed: int
) -> None:
    weights = odd_ones(normal(rows, width, seed), share, seed)
    matrix = compressed(library, weights)
    assume(matrix is not None)
    assert matrix is not None
    assert same_bits(decompressed(matrix), weights)
    back = torch.full_like(weights, torch.nan)
    decompress_matrix(library, matrix, back)
    assert same_bits(back, weights)


def test_weights_of_a_normal_distribution_take_three_quarters(library: ctypes.CDLL) -> None:
    weights = normal(1000, 768, 0)
    matrix = compressed(library, weights)
    assert matrix is not None
    assert 0.75 < len(matrix.stored) / (2 * weights.numel()) < 0.78


@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_matrix_not_worth_compressing_stays_as_it_is(library: ctypes.CDLL, share: float) -> None:
    """Weights of many magnitudes need too many escapes, in total or in one block."""
    assert compressed(library, odd_ones(normal(128, 512, 0), share, 1)) is None
    assert compressed(library, odd_ones(normal(128, 512, 0), 0.01, 1, largest=254)) is None


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 3e38])
def test_constant_matrix_is_restored(library: ctypes.CDLL, value: float) -> None:
    weights = torch.full((64, 96), value).bfloat16()
    matrix = compressed(library, weights)
    assert matrix is not None
    assert same_bits(decompressed(matrix), weights)


@given(
    count=st.one_of(st.integers(1, 40), st.integers(60, 140)),
    rows=ROWS,
    width=WIDTHS,
    share=st.sampled_from([0, 0.02]),
    threads=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_have_the_bits_of_weights_as_they_are(
    library: ctypes.CDLL,
    count: int,
    rows: int,
    width: int,
    share: float,
    threads: int,
    bias: bool,
    seed: int,
) -> None:
    weights = odd_ones(normal(rows, width, seed), share, seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, width, generator=generator)
    added = torch.randn(rows, generator=generator)
    matrix = compressed(library, weights)
    assume(matrix is not None)
    assert matrix is not None
    found, expected = products(library, matrix, weights, inputs, added if bias else None, threads)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("count", "width"), [(129, 9000), (256, 4160), (3, 9000)])
def test_products_of_long_rows_are_summed_part_by_part(
    library: ctypes.CDLL, count: int, width: int
) -> None:
    """With 129 or 256 rows, the activations do not fit into the second-level cache, so the sums are
    computed over one block of columns at a time. Three rows fit."""
    weights = normal(94, width, 0)
    inputs = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    matrix = compressed(library, weights)
    assert matrix is not None
    found, expected = products(library, matrix, weights, inputs, None, 2)
    assert torch.equal(found, expected)


def products(
    library: ctypes.CDLL,
    matrix: CompressedMatrix,
    weights: Tensor,
    inputs: Tensor,
    bias: Tensor | None,
    threads: int,
) -> tuple[Tensor, Tensor]:
    """Products of a compressed matrix, and of the uncompressed weights."""
    here, there = matrix.described(), placed_matrix(weights, "bfloat16", bias=bias)
    if bias is not None:
        here.bias = bias.data_ptr()
    return native(library, here, inputs, threads), native(library, there, inputs, threads)
