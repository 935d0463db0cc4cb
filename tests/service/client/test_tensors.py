"""Safetensors replies as arrays: files written by the safetensors package are read, and broken
files are refused."""

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from logitd.service.client.reading import WrongShape
from logitd.service.client.results import Checkpoint
from logitd.service.client.tensors import TensorFile

METADATA = {
    "checkpoint_name": "a",
    "checkpoint_step": "5",
    "checkpoint_val_loss": "2.25",
    "checkpoint_weights_sha256": "ff",
    "stage": "raw",
}


def file(header: Any, data: bytes = b"") -> TensorFile:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return TensorFile(bytearray(len(text).to_bytes(8, "little") + text + data))


def one(dtype: str, shape: Any, offsets: Any, data: bytes) -> TensorFile:
    return file({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, data)


@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st_numpy.arrays(
            st.sampled_from([np.float32, np.float16, np.int64]),
            st_numpy.array_shapes(min_dims=0, min_side=0),
        ),
        max_size=4,
    )
)
def test_files_of_the_package_are_read(tensors: dict[str, Any]) -> None:
    found = TensorFile(bytearray(safetensors.numpy.save(tensors, METADATA)))
    for name, array in tensors.items():
        assert found.array(name).dtype == array.dtype
        assert np.array_equal(found.array(name), array, equal_nan=array.dtype.kind == "f")
    assert found.checkpoint == Checkpoint("a", 5, 2.25, "ff")
    assert found.stage == "raw"


def test_bfloat16_becomes_the_same_float32() -> None:
    numbers = torch.randn(3, 5).bfloat16()
    numbers[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    found = TensorFile(bytearray(safetensors.torch.save({"x": numbers}))).array("x")
    assert found.dtype == np.float32
    assert np.array_equal(found, numbers.float().numpy(), equal_nan=True)


def test_tensors_at_odd_offsets_are_aligned() -> None:
    number = np.array([1.5, 2.5], dtype=np.float32)
    found = one("F32", [2], [1, 9], b"\0" + number.tobytes()).array("x")
    assert found.flags.aligned
    assert np.array_equal(found, number)


def test_checkpoint_names_the_code_of_its_owner() -> None:
    metadata = METADATA | {"checkpoint_code": "own.py:Net"}
    assert file({"__metadata__": metadata}).checkpoint.code == "own.py:Net"


def test_loss_may_be_unknown() -> None:
    assert file({"__metadata__": METADATA | {"checkpoint_val_loss": "None"}}).checkpoint == (
        Checkpoint("a", 5, None, "ff")
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, b"\xff" * 8, b"\x02" + b"\0" * 7, b"\x02" + b"\0" * 7 + b"[]",
     b"\x02" + b"\0" * 7 + b"{{",
     b"\x03" + b"\0" * 7 + b"{}", b"<html>Hello</html>",
     (100_000).to_bytes(8, "little") + b"[" * 100_000],
)  # fmt: skip
def test_other_contents_are_refused(content: bytes) -> None:
    with pytest.raises(WrongShape):
        TensorFile(bytearray(content))


@pytest.mark.parametrize(
    ("dtype", "shape", "offsets"),
    [
        ("F32", [2], [0, 4]),  # too few bytes
        ("F32", [1], [0, 8]),  # too many
        ("F32", [2], [4, 12]),  # beyond the end
        ("F32", [1], [0, 5]),  # half a number
        ("F32", [2], [8, 0]),
        ("F32", [2], [-8, 0]),
        ("F32", [-2], [0, 8]),
        ("F32", [-2, -1], [0, 8]),
        ("F32", [2], [0, 8, 8]),
        ("F32", [2], [0]),
        ("F32", 2, [0, 8]),
        ("F32", [2.0], [0, 8]),
        ("F64", [1], [0, 8]),
        ("F32", [0, 10**30], [0, 0]),
        ("F32", [0, 2**62, 4], [0, 0]),
        ("F32", [0] * 100, [0, 0]),
        (None, [2], [0, 8]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(dtype: Any, shape: Any, offsets: Any) -> None:
    with pytest.raises(WrongShape, match=r"^x"):
        one(dtype, shape, offsets, b"\0" * 8).array("x")


def test_missing_tensors_and_metadata_are_named() -> None:
    with pytest.raises(WrongShape, match=r"^logits is missing$"):
        file({}).array("logits")
    for name in METADATA:
        found = file({"__metadata__": {k: v for k, v in METADATA.items() if k != name}})
        with pytest.raises(WrongShape, match=f"^__metadata__.{name} is missing$"):
            _ = (found.stage, found.checkpoint)
    with pytest.raises(WrongShape, match="should be numbers"):
        _ = file({"__metadata__": METADATA | {"checkpoint_step": "x"}}).checkpoint


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_any_bytes_are_read_or_refused(content: bytes, place: int, value: int) -> None:
    whole = bytearray(safetensors.numpy.save({"x": np.zeros(2, dtype=np.float32)}, METADATA))
    whole[place % len(whole)] = value
    for changed in (bytearray(content), whole, bytearray(whole[: place % len(whole)])):
        with suppress(WrongShape):
            found = TensorFile(changed)
            _ = (found.array("x"), found.checkpoint, found.stage)
