"""The native kernels of this machine, for the tests that hold them to their twins."""

import ctypes

import pytest

from model.kernels.library import KernelsUnavailable, load_library


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """Skips where there is no compiler: then there is nothing to test but the twins."""
    try:
        return load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
