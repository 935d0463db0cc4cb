"""Activations of the native kernels compared with float64, at every magnitude and on every
target."""

import ctypes
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from logitd.model.inference.kernels.cpu.structures import ACTIVATIONS


def by_tanh(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def by_erf(x: Tensor) -> Tensor:
    return x * torch.special.ndtr(x)


EXACT: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": by_tanh,
    "gelu": by_erf,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "swiglu": lambda x: x * torch.sigmoid(x),
}
ULP = 2.0**-23


def native(library: ctypes.CDLL, name: str, x: Tensor, values: Tensor | None = None) -> Tensor:
    """The activation of `x`, multiplied by `values` if the activation is gated."""
    library.logitd_activate.argtypes = (
        ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
    )  # fmt: skip
    both = x if values is None else torch.cat((x, values))
    out = torch.full_like(x, float("nan"))
    library.logitd_activate(ACTIVATIONS[name], both.data_ptr(), out.data_ptr(), len(x))
    return out


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_match_float64(library: ctypes.CDLL, name: str) -> None:
    """The error is a few units in the last place of the input, even if the result is tiny."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.rand(2**16, generator=generator) * 40 - 30  # 2^-30 to 2^10
    x = torch.exp2(powers) * torch.randn(2**16, generator=generator).sign()
    values = torch.randn(len(x), generator=generator) if name == "swiglu" else None
    exact = EXACT[name](x.double())
    if values is not None:
        exact *= values.double()
    scale = x.double().abs() * (1 if values is None else values.double().abs())
    if name == "relu2":
        scale = scale**2
    off = (native(library, name, x, values).double() - exact).abs()
    assert (off <= 3 * ULP * scale + 1e-30).all(), (off / scale).max() / ULP


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_nan_and_the_largest_numbers(library: ctypes.CDLL, name: str) -> None:
    """ReLU may map NaN to 0, because the NaN is still in the residual stream."""
    x = torch.tensor([math.nan, math.inf, 3e38, 0.0, -0.0, -1e6, 1e4, -20.0] * 2)
    values = torch.ones_like(x) if name == "swiglu" else None
    found = native(library, name, x, values)[:8].tolist()
    assert found[0] == 0 if name.startswith("relu") else math.isnan(found[0])
    square = name == "relu2"
    assert found[1:3] == ([math.inf, math.inf] if square else [math.inf, x[2].item()])
    assert found[3:5] == [0.0, 0.0]
    assert abs(found[5]) < 1e-30
    assert found[6] == (1e8 if square else 1e4)
    assert abs(found[7]) < 1e-7
