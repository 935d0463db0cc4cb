"""The native kernels of this machine, for the tests that hold them to their twins."""

import ctypes

import pytest
import torch

from model.inference.kernels.cpu.library import KernelsUnavailable, load_library

LESSER = ("x86-64-v3", "x86-64-v2")
"""With AVX2 and without: other instructions, the same results."""


@pytest.fixture(
    scope="session",
    params=["native", *(pytest.param(name, marks=pytest.mark.slow) for name in LESSER)],
)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Skips where there is no compiler: then there is nothing to test but the twins."""
    if request.param != "native" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip(f"{request.param} is none of this machine's processors")
    try:
        return load_library(processor=request.param)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
