"""Rows as bytes: what we write, NumPy reads."""

import io

import numpy as np
import pytest

from service.rows import as_dtype, npy_header


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 257), (1024, 50257), (10**7, 10**6)])
def test_the_header_is_that_of_numpy(shape: tuple[int, int], dtype: str) -> None:
    header = npy_header(shape, np.dtype(dtype))
    assert len(header) % 64 == 0
    read = io.BytesIO(header)
    assert np.lib.format.read_magic(read) == (1, 0)
    assert np.lib.format.read_array_header_1_0(read) == (shape, False, np.dtype(dtype))
    assert read.read() == b""


def test_header_and_pieces_make_a_file() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    file = npy_header((5, 7), np.dtype("<f4")) + rows[:2].tobytes() + rows[2:].tobytes()
    assert np.array_equal(np.load(io.BytesIO(file)), rows)


def test_rows_are_contiguous_in_the_numbers_asked_for() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    for name in ("float32", "float16"):
        converted = as_dtype(rows, name)
        assert converted.dtype == np.dtype(name)
        assert converted.flags.c_contiguous
        assert np.array_equal(converted, rows)
