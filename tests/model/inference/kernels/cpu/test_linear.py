"""Products of the native kernels against their twin, which adds up in float64: any number of rows,
odd sizes, weights that begin anywhere; and a row by itself is the same bits as among others."""

import ctypes
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.kernels.cpu.quantize import Format, quantized_matrix
from logitd.model.inference.kernels.cpu.structures import KINDS, Matrix
from logitd.model.inference.options import KernelTarget
from tests.profiles import examples

READ_BEHIND = 64
"""Numbers: a last vector may begin within a row and end behind it; memory is finite there."""


def moved(weights: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` numbers into memory, with room behind it."""
    room = torch.zeros(offset + weights.numel() + READ_BEHIND, dtype=weights.dtype)
    placed = room[offset : offset + weights.numel()].view(weights.shape)
    return placed.copy_(weights)


def native(library: ctypes.CDLL, matrix: Matrix, inputs: Tensor, threads: int) -> Tensor:
    """Rows (count, width) times a matrix: (count, rows)."""
    out = torch.full((len(inputs), matrix.rows), float("nan"))
    library.logitd_linear.argtypes = (
        ctypes.POINTER(Matrix), ctypes.c_void_p, *(ctypes.c_int32,) * 3, ctypes.c_void_p
    )  # fmt: skip
    library.logitd_linear(
        ctypes.byref(matrix), inputs.data_ptr(), len(inputs), threads, 1, out.data_ptr()
    )
    return out


def needs_tiles(library: ctypes.CDLL) -> None:
    if not library.logitd_has_tiles():
        pytest.skip("these kernels have no tiles")


def rounded_rows(inputs: Tensor) -> Tensor:
    """Activations as int8 and int4 round them: each row in 127 steps of its largest."""
    largest = inputs.abs().amax(dim=1, keepdim=True)
    steps = torch.full_like(largest, 127) / largest  # 127 / largest takes a reciprocal first
    return (inputs * steps).round().double() * (largest / 127).double()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "compressed"])
@given(
    count=st.one_of(st.integers(1, 9), st.integers(10, 29), st.integers(30, 70)),
    rows=st.integers(1, 90),
    width=st.one_of(st.integers(1, 200), st.integers(505, 600)),
    offset=st.integers(0, 17),
    threads=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_are_the_twins(
    library: ctypes.CDLL,
    kind: Any,
    count: int,
    rows: int,
    width: int,
    offset: int,
    threads: int,
    bias: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, width, generator=generator)
    inputs = torch.randn(count, width, generator=generator)
    added = torch.randn(rows, generator=generator) if bias else None
    matrix = Matrix(kind=KINDS[kind], rows=rows, width=width)
    if added is not None:
        matrix.bias = added.data_ptr()
    if kind in get_args(Format):
        if kind == "int8_strips":
            needs_tiles(library)
        quantized = quantized_matrix(weights, kind)
        placed = moved(quantized.stored, offset)
        matrix.scale, matrix.row_sum = quantized.scale.data_ptr(), quantized.row_sum.data_ptr()
        exact = rounded_rows(inputs) @ quantized.dequantized().double().T
    else:
        dtype = getattr(torch, kind)
        placed = moved(weights.to(dtype), offset)
        exact = inputs.to(dtype).double() @ placed.double().T
    matrix.weights = placed.data_ptr()
    if added is not None:
        exact += added.double()
    found = native(library, matrix, inputs, threads)
    assert_close(found.double(), exact, atol=2e-4 * width**0.5, rtol=1e-4)
    for row in {0, count // 2, count - 1}:
        alone = native(library, matrix, inputs[row : row + 1].clone(), 1)
        assert torch.equal(alone[0], found[row]), row


@pytest.mark.parametrize(
    ("kind", "width"), [("bfloat16", 9000), ("int8", 17000), ("int8_strips", 17000)]
)
def test_more_rows_than_the_second_cache_holds_are_the_bits_of_each(
    library: ctypes.CDLL, kind: Literal["bfloat16", "int8", "int8_strips"], width: int
) -> None:
    """Rows meet the weights some at a time, and one is left over."""
    if kind == "int8_strips":
        needs_tiles(library)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(129, width, generator=generator)
    weights = torch.randn(70, width, generator=generator)
    matrix = Matrix(kind=KINDS[kind], rows=70, width=width)
    if kind != "bfloat16":
        quantized = quantized_matrix(weights, kind)
        placed = moved(quantized.stored, 0)
        matrix.scale, matrix.row_sum = quantized.scale.data_ptr(), quantized.row_sum.data_ptr()
    else:
        placed = moved(weights.bfloat16(), 0)
    matrix.weights = placed.data_ptr()
    together = native(library, matrix, inputs, 2)
    for row in (0, 31, 63, 64, 95, 96, 127, 128):
        [alone] = native(library, matrix, inputs[row : row + 1].clone(), 1)
        assert torch.equal(alone, together[row]), row


@given(
    count=st.one_of(st.integers(1, 20), st.integers(21, 300)),
    rows=st.integers(1, 200),
    width=st.one_of(st.integers(1, 1100), st.just(3072)),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_strips_of_int8_have_the_bits_of_its_rows(
    library: ctypes.CDLL, count: int, rows: int, width: int, threads: int, seed: int
) -> None:
    """Wherever they begin: with a few rows of activations they were once read as if that were where
    a line begins, and the process ended."""
    needs_tiles(library)
    generator = torch.Generator().manual_seed(seed)
    inputs, weights = (5 * torch.randn(n, width, generator=generator) for n in (count, rows))
    bias = torch.randn(rows, generator=generator)
    found = []
    for form in ("int8", "int8_strips"):
        quantized = quantized_matrix(weights, form)
        placed = moved(quantized.stored, seed % 64)
        matrix = Matrix(
            kind=KINDS[form], rows=rows, width=width, weights=placed.data_ptr(),
            bias=bias.data_ptr(), scale=quantized.scale.data_ptr(),
            row_sum=quantized.row_sum.data_ptr(),
        )  # fmt: skip
        found.append(native(library, matrix, inputs, threads))
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("target", ["x86-64-v2", "x86-64-v3"])
def test_quantized_products_have_the_same_bits_on_every_target(
    kind: Literal["int8", "int4"], target: KernelTarget
) -> None:
    """The products are sums of integers."""
    try:
        libraries = [load_library(target=one).functions for one in ("auto", target)]
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    generator = torch.Generator().manual_seed(0)
    for rows, width in ((50, 300), (333, 768), (64, 41)):
        inputs = 5 * torch.randn(37, width, generator=generator)
        quantized = quantized_matrix(torch.randn(rows, width, generator=generator), kind)
        placed = moved(quantized.stored, 0)
        matrix = Matrix(
            kind=KINDS[kind], rows=rows, width=width, weights=placed.data_ptr(),
            scale=quantized.scale.data_ptr(), row_sum=quantized.row_sum.data_ptr(),
        )  # fmt: skip
        here, there = (native(library, matrix, inputs, 2) for library in libraries)
        assert torch.equal(here, there)
