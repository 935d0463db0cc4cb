"""Rounded matrices: their accuracy, their packed form for the kernels, and sums that must not
overflow."""

import ctypes
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from logitd.model.inference.kernels.cpu.quantize import (
    LARGEST,
    ROWS_AT_ONCE,
    SCALES,
    Format,
    QuantizedMatrix,
    int4_row_bytes,
    largest_scale,
    round_matrix,
    stored_shape,
)
from tests.model.inference.kernels.cpu.plain_forms import int4_matrix, quantized_matrix
from tests.profiles import examples


def unpacked(matrix: QuantizedMatrix) -> tuple[Tensor, Tensor]:
    """The integers (rows, width) of a matrix and the scale of each integer, read byte by byte in
    the layout of `I4` in native/dot.h."""
    values, scales, place = [], [], 0
    for start in range(0, matrix.width, 256):
        block = matrix.stored[:, place : place + SCALES].view(torch.int8).int()
        place += SCALES
        for _ in range(start, min(start + 256, matrix.width), 64):
            packed = matrix.stored[:, place : place + 32].int()
            values += [(packed & 15) - 8, (packed >> 4) - 8]
            scales += 2 * [block.repeat_interleave(2, dim=1)]
            place += 32
    assert place == int4_row_bytes(matrix.width) == matrix.stored.shape[1]
    width = matrix.width
    return torch.cat(values, dim=1)[:, :width], torch.cat(scales, dim=1)[:, :width]


@given(
    rows=st.integers(1, 5),
    width=st.one_of(st.integers(1, 140), st.integers(250, 600)),
    magnitude=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(60))
def test_int4_is_packed_as_the_kernels_read_it(
    rows: int, width: int, magnitude: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = magnitude * torch.randn(rows, width, generator=generator)
    matrix = int4_matrix(weight)
    values, scales = unpacked(matrix)
    assert scales.abs().max() <= LARGEST
    assert torch.equal(matrix.row_sum, (values * scales).sum(dim=1))
    dequantized = matrix.dequantized()
    assert torch.equal(dequantized, (values * scales).float() * matrix.scale[:, None])
    assert_close(int4_matrix(dequantized).dequantized(), dequantized, rtol=1e-6, atol=0)
    # Half a step of the block's scale; a whole step if the largest value has the other sign and
    # would be 8; and eight times the error of rounding the scale to a 127th of the row's.
    step = (scales.abs() + 0.5) * matrix.scale[:, None]
    assert ((dequantized - weight).abs() <= step + 4 * matrix.scale[:, None]).all()


@pytest.mark.parametrize("width", [64, 300, 768])
def test_four_bits_of_gaussian_weights_are_near(width: int) -> None:
    """The standard deviation of the error is 7 % of that of the weights. With one scale per row, it
    would be twice as large."""
    weight = torch.randn(200, width, generator=torch.Generator().manual_seed(0))
    error = (int4_matrix(weight).dequantized() - weight).std()
    assert error < 0.08
    assert (quantized_matrix(weight, "int8").dequantized() - weight).std() < 0.2 * error


@pytest.mark.parametrize("form", get_args(Format))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros(form: Format, dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 100, dtype=dtype)
    weight[1, :40] = 1
    assert torch.equal(quantized_matrix(weight, form).dequantized(), weight.float())


@pytest.mark.parametrize("width", [1, 64, 4096, 8192, 8256, 14336, 65536])
def test_no_sum_leaves_32_bits(width: int) -> None:
    """The worst case: every weight is -8 with the largest scale, and every activation is 255."""
    matrix = int4_matrix(torch.ones(1, width))
    values, scales = unpacked(matrix)
    assert (values == -8).all()
    assert (scales == -largest_scale(width)).all()
    assert 255 * 8 * largest_scale(width) * width < 2**31
    assert largest_scale(width) == LARGEST or width > 8192
    assert matrix.row_sum.item() == 8 * largest_scale(width) * width


@given(
    rows=st.sampled_from([1, 3, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 7]),
    width=st.one_of(st.integers(1, 140), st.integers(250, 600)),
    kind=st.sampled_from(get_args(Format)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    magnitude=st.sampled_from([1e-35, 1e-6, 1.0, 1e4]),
    outlier=st.sampled_from([1.0, 40.0, 1e6]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_native_code_rounds_to_the_bits_of_plain_torch(
    library: ctypes.CDLL,
    rows: int,
    width: int,
    kind: Format,
    dtype: torch.dtype,
    magnitude: float,
    outlier: float,
    seed: int,
) -> None:
    """The rows include ties, outliers within the range of a scale, scales of 0, and rows of
    zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = magnitude * torch.randn(rows, width, generator=generator)
    weight[:, seed % width] *= outlier
    weight[0] = 0
    weight[-1] = weight[-1].sign() * 0.5 * torch.arange(width)  # halves, between two integers
    weight = weight.to(dtype)
    whole = quantized_matrix(weight.clone(), kind)
    stored = torch.zeros_like(stored_shape(weight, kind), device="cpu")
    rounded = round_matrix(library, weight, kind, stored)
    assert torch.equal(rounded.stored, whole.stored)
    assert torch.equal(rounded.scale, whole.scale)
    assert torch.equal(rounded.row_sum, whole.row_sum)
    assert same_bits(weight, whole.dequantized().to(dtype))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if all numbers are equal, including the signs of zeros."""
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())
