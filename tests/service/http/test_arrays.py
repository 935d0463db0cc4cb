"""Arrays as bytes that NumPy and safetensors read."""

import io
from typing import Any

import numpy as np
import orjson
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.operations.body import DType
from logitd.service.errors import ApiError
from logitd.service.http.arrays import (
    JSON_ELEMENTS,
    PART_BYTES,
    TensorSpec,
    byte_parts,
    encoded,
    json_parts,
    npy_header,
    safetensors_header,
)

FLOATS = st.floats(width=32)  # NaN, infinities, subnormals and zeros of both signs too


def random_array(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("dtype", "descr"), [("float32", "<f4"), ("float16", "<f2")])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 257), (1024, 50257), (12, 10**7, 10**6)])
def test_npy_header_equals_numpys(shape: tuple[int, ...], dtype: DType, descr: str) -> None:
    header = npy_header(shape, dtype)
    assert len(header) % 64 == 0
    read = io.BytesIO(header)
    assert np.lib.format.read_magic(read) == (1, 0)
    assert np.lib.format.read_array_header_1_0(read) == (shape, False, np.dtype(descr))
    assert read.read() == b""


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float32", "float16", "int64"]),
            st.lists(st.integers(1, 5), max_size=3).map(tuple),
        ),
        max_size=5,
    )
)
def test_safetensors_reads_what_we_write(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    specs = [TensorSpec(f"t.{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors)]
    arrays = [np.arange(np.prod(s.shape), dtype=s.dtype).reshape(s.shape) for s in specs]
    file = safetensors_header(specs, {"who": "é", "x": ""}) + b"".join(a.tobytes() for a in arrays)
    loaded = safetensors.numpy.load(file)
    assert loaded.keys() == {spec.name for spec in specs}
    for spec, array in zip(specs, arrays, strict=True):
        assert loaded[spec.name].dtype == array.dtype
        assert np.array_equal(loaded[spec.name], array)


@given(st.lists(FLOATS, min_size=1, max_size=50))
def test_bfloat16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    torchs = torch.from_numpy(array).bfloat16()
    if (torchs.isinf().numpy() & np.isfinite(array)).any():
        with pytest.raises(ApiError, match=r"largest number is 3.38953e\+38"):
            encoded(array, "bfloat16")
        return
    ours = torch.from_numpy(encoded(array, "bfloat16").view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), torchs.isnan())
    real = ~torchs.isnan()
    assert torch.equal(ours[real].view(torch.int16), torchs[real].view(torch.int16))


@pytest.mark.parametrize(("value", "fits"), [(65519.0, True), (65520.0, False), (-7e4, False)])
def test_float16_keeps_finite_values_finite(value: float, fits: bool) -> None:
    array = np.array([[-np.inf, np.nan], [1.0, value]], dtype=np.float32)
    if fits:
        assert np.array_equal(encoded(array, "float16"), array.astype("<f2"), equal_nan=True)
    else:
        with pytest.raises(ApiError, match=f"65504.*is {value:g};") as info:
            encoded(array, "float16")
        assert info.value.param == "dtype"


def test_arrays_are_contiguous() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    dtypes: list[DType] = ["float32", "float16"]
    for name in dtypes:
        converted = encoded(rows, name)
        assert converted.dtype == np.dtype(name)
        assert converted.flags.c_contiguous
        assert np.array_equal(converted, rows)


@pytest.mark.parametrize("numbers", [0, 1, PART_BYTES // 4, PART_BYTES // 4 + 1, 200_000])
def test_bytes_come_in_parts(numbers: int) -> None:
    array = random_array(numbers)
    parts = list(byte_parts(array))
    assert b"".join(parts) == array.tobytes()
    assert all(0 < len(part) <= PART_BYTES for part in parts)


@pytest.mark.parametrize(
    "shape", [(3,), (2, 3), (4, 1, 5), (3, 2, 100, 90), (1, 30_000), (2, 1, 0)]
)
def test_json_comes_in_parts(shape: tuple[int, ...]) -> None:
    array = random_array(*shape)
    parts = list(json_parts(array))
    assert orjson.loads(b"".join(parts)) == array.tolist() or np.array_equal(
        np.array(orjson.loads(b"".join(parts)), dtype=np.float32).reshape(shape), array
    )
    assert max(map(len, parts)) <= 25 * max(JSON_ELEMENTS, shape[-1])


def test_value_that_is_not_finite_is_null_in_json() -> None:
    array = np.array([[1.5, -np.inf], [np.nan, np.inf]], dtype=np.float32)
    assert b"".join(json_parts(array)) == b"[[1.5,null],[null,null]]"
