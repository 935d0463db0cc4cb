"""Products of the native kernels compared with sums in float64, for any number of rows, odd sizes,
and weights at any address. A row has the same bits alone and in a batch."""

import ctypes
from typing import Any, Literal, cast, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.kernels.cpu.quantize import Format
from logitd.model.inference.kernels.cpu.structures import KINDS, Matrix
from logitd.model.inference.options import KernelTarget
from tests.model.inference.kernels.cpu.plain_forms import quantized_matrix
from tests.profiles import examples

READ_BEHIND = 64
"""Number of zeros placed after the weights, because the last vector load may extend beyond the end
of a row."""


def moved(weights: Tensor, offset: int) -> Tensor:
    """A copy that starts `offset` elements into its memory, followed by READ_BEHIND zeros."""
    room = torch.zeros(offset + weights.numel() + READ_BEHIND, dtype=weights.dtype)
    placed = room[offset : offset + weights.numel()].view(weights.shape)
    return placed.copy_(weights)


def placed_matrix(
    weights: Tensor, kind: str, offset: int = 0, bias: Tensor | None = None
) -> Matrix:
    """A Matrix of the given kind, which keeps its tensors alive. Its weights start `offset`
    elements into their memory."""
    rows, width = weights.shape
    matrix = Matrix(kind=KINDS[kind], rows=rows, width=width)
    matrix.alive = [bias]
    if bias is not None:
        matrix.bias = bias.data_ptr()
    if kind in get_args(Format):
        quantized = quantized_matrix(weights, cast(Format, kind))
        matrix.scale, matrix.row_sum = quantized.scale.data_ptr(), quantized.row_sum.data_ptr()
        matrix.alive.append(quantized)
        stored = quantized.stored
    else:
        stored = weights.to(getattr(torch, kind))
    placed = moved(stored, offset)
    matrix.weights = placed.data_ptr()
    matrix.alive.append(placed)
    return matrix


def native(library: ctypes.CDLL, matrix: Matrix, inputs: Tensor, threads: int) -> Tensor:
    """Rows (count, width) times a matrix: (count, rows)."""
    out = torch.full((len(inputs), matrix.rows), float("nan"))
    library.logitd_linear.argtypes = (
        ctypes.POINTER(Matrix), ctypes.c_void_p, *(ctypes.c_int32,) * 2, ctypes.c_void_p
    )  # fmt: skip
    library.logitd_linear(
        ctypes.byref(matrix), inputs.data_ptr(), len(inputs), threads, out.data_ptr()
    )
    return out


def needs_strips(library: ctypes.CDLL) -> None:
    if not library.logitd_has_strips():
        pytest.skip("these kernels do not multiply strips")


def rounded_rows(inputs: Tensor) -> Tensor:
    """Activations rounded as for int8 and int4: each row to multiples of 1/127 of its largest
    magnitude."""
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
    if kind == "int8_strips":
        needs_strips(library)
    matrix = placed_matrix(weights, kind, offset, added)
    if kind in get_args(Format):
        exact = rounded_rows(inputs) @ quantized_matrix(weights, kind).dequantized().double().T
    else:
        dtype = getattr(torch, kind)
        exact = inputs.to(dtype).double() @ weights.to(dtype).double().T
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
def test_rows_beyond_the_second_cache_keep_their_bits(
    library: ctypes.CDLL, kind: Literal["bfloat16", "int8", "int8_strips"], width: int
) -> None:
    """The rows are multiplied by the weights in groups, and the last group has a single row."""
    if kind == "int8_strips":
        needs_strips(library)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(129, width, generator=generator)
    weights = torch.randn(70, width, generator=generator)
    matrix = placed_matrix(weights, kind)
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
    """The activations may start at any address: a load that required alignment once crashed the
    process."""
    needs_strips(library)
    generator = torch.Generator().manual_seed(seed)
    inputs, weights = (5 * torch.randn(n, width, generator=generator) for n in (count, rows))
    bias = torch.randn(rows, generator=generator)
    by_rows, by_strips = (
        native(library, placed_matrix(weights, form, seed % 64, bias), inputs, threads)
        for form in ("int8", "int8_strips")
    )
    assert torch.equal(by_rows, by_strips)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("target", ["x86-64-v2", "x86-64-v3"])
def test_quantized_products_have_the_same_bits_on_every_target(
    kind: Literal["int8", "int4"], target: KernelTarget
) -> None:
    """The products are sums of integers, which are exact in any order."""
    try:
        libraries = [load_library(target=one).functions for one in ("auto", target)]
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    generator = torch.Generator().manual_seed(0)
    for rows, width in ((50, 300), (333, 768), (64, 41)):
        inputs = 5 * torch.randn(37, width, generator=generator)
        matrix = placed_matrix(torch.randn(rows, width, generator=generator), kind)
        here, there = (native(library, matrix, inputs, 2) for library in libraries)
        assert torch.equal(here, there)
