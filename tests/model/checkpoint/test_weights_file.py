"""Weights files: safetensors files are read or refused as the safetensors package reads or refuses
them."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save_file
from torch import Tensor

from logitd.model.checkpoint.hashed_file import PIECE, HashedFile
from logitd.model.checkpoint.weights_file import (
    DTYPES,
    LARGEST_HEADER,
    WeightsFileError,
    read_elements,
    read_header,
    write_weights,
)
from tests.model.full_disk import files_of_at_most


def read(path: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Read all tensors of a file, in the file's dtype or in the given one."""
    with HashedFile(path) as file:
        weights = {}
        for tensor in read_header(file):
            weights[tensor.name] = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
            read_elements(file, tensor, weights[tensor.name], lambda numbers: None)
        assert not file.take(1)
    return weights


def test_each_dtype_and_shape_is_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {
        f"{name}-{len(shape)}": torch.randint(0, 2, shape).to(dtype)
        for name, dtype in DTYPES.items()
        for shape in ((), (7,), (3, 5), (2, 0, 3))
    }
    save_file(weights, tmp_path / "all", metadata={"format": "pt"})
    found = read(tmp_path / "all")
    assert set(found) == set(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_of_several_pieces_are_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """The file is read in pieces, and some pieces end in the middle of a tensor."""
    torch.manual_seed(0)
    weights = {
        "a": torch.randn(3, 5),
        "b": torch.randn(2 * PIECE // 4 + 13),
        "c": torch.randn(1001, 1049),
    }
    save_file(weights, tmp_path / "large")
    for name, tensor in read(tmp_path / "large", dtype).items():
        assert torch.equal(tensor, weights[name].to(dtype)), name


def test_every_number_is_seen_once_as_stored(tmp_path: Path) -> None:
    weight = torch.randn(PIECE // 2)
    save_file({"weight": weight}, tmp_path / "file")
    seen: list[Tensor] = []
    with HashedFile(tmp_path / "file") as file:
        (tensor,) = read_header(file)
        into = torch.empty(tensor.shape, dtype=torch.bfloat16)
        read_elements(file, tensor, into, lambda numbers: seen.append(numbers.clone()))
    assert torch.equal(torch.cat(seen), weight)


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    """Write a weights file with this header, which is given as bytes or as a JSON value."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(start: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "header.*JSON"),
        (b"\xff", "header.*JSON"),
        (b"[" * 100_000, "header.*JSON"),
        ([1], "header.*JSON object"),
        ({"w": 5}, "'5' for w.*data_offsets"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "w.*data_offsets"),
        ({"w": entry() | {"data_offsets": [0]}}, "w.*data_offsets"),
        ({"w": entry(dtype="F31")}, "w.*dtype 'F31'.*BOOL, U8"),
        ({"w": entry(dtype=["F32"])}, r"w.*dtype \['F32'\]"),
        ({"w": entry(shape=[2.0])}, r"w.*shape \[2.0\] and the bytes 0 to 8"),
        ({"w": entry(shape=[-2])}, r"w.*shape \[-2\] and the bytes 0 to 8"),
        ({"w": entry(shape=[True, 2])}, r"w.*shape \[True, 2\] and the bytes 0 to 8"),
        ({"w": entry(shape=2)}, "w.*shape 2 and the bytes 0 to 8"),
        ({"w": entry(shape=[10**4000])}, "header.*1000.* 64 bits"),
        ({"w": entry(shape=[2**63 - 1] * 8)}, "w.*F32.*0 to 8"),
        ({"w": entry(shape=[1] * 9)}, "w.*shape.* 8 "),
        ({"w": entry(end="8")}, r"w.*shape \[2\] and the bytes 0 to 8"),
        ({"w": entry(end=12)}, r"w.*\[2\].*F32.*0 to 12.*2 times 4 bytes"),
        ({"w": entry(4, 12)}, "w.* 4.* 0$"),
        ({"v": entry(), "w": entry(4, 12)}, "w.* 4.* 8$"),
        ({"v": entry(), "w": entry(12, 20)}, "w.* 12.* 8$"),
    ],
)
def test_header_refuses_a_damaged_entry(tmp_path: Path, header: Any, message: str) -> None:
    path = written(tmp_path / "file", header, bytes(20))
    with HashedFile(path) as file, pytest.raises(WeightsFileError, match=message):
        read_header(file)
    with pytest.raises(SafetensorError):
        parse_safetensors(path.read_bytes())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "0 bytes.* 8"),
        (bytes(7), "7 bytes.* 8"),
        ((10).to_bytes(8, "little") + b"{}", "10 bytes.* 2"),
        (b"\xff" * 99, f"{LARGEST_HEADER:,}"),
    ],
)
def test_header_refuses_a_file_that_ends_within_it(
    tmp_path: Path, raw: bytes, message: str
) -> None:
    (tmp_path / "file").write_bytes(raw)
    with HashedFile(tmp_path / "file") as file, pytest.raises(WeightsFileError, match=message):
        read_header(file)


@pytest.mark.parametrize("left", [0, 7])
def test_file_that_ends_within_a_tensor_is_refused(tmp_path: Path, left: int) -> None:
    path = written(tmp_path / "file", {"v": entry(), "w": entry(8, 16)}, bytes(8 + left))
    with pytest.raises(WeightsFileError, match="within w"):
        read(path)


def test_full_disk_raises_os_error(tmp_path: Path) -> None:
    """safetensors raises an error that is not an OSError, so `logitd import` and `export` once
    ended in a traceback."""
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large") as caught:
        write_weights(tmp_path / "large", {"a": torch.zeros(1000)})
    assert caught.value.errno == errno.EFBIG


def test_write_keeps_other_errors_of_the_library(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        write_weights(tmp_path / "turned", {"a": torch.zeros(3, 5).T})
