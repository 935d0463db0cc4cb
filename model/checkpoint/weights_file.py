"""Weights file: safetensors read front to back, tensor after tensor, into memory that is there.

The safetensors library wants the whole file in memory and copies it once more, or maps it, and then
the file can change under a running model. Here no more of the file is in memory at a time than a
piece (`model/checkpoint/hashed_file.py`). Covers what safetensors says of its files: a length, a
header of JSON, tensors without gaps between them. Written is a file by the library, whose errors of
the disk become the system's. Does not know what the tensors should be called.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from logitd.model.checkpoint.hashed_file import PIECE, HashedFile
from logitd.model.files import parse_json

LARGEST_HEADER = 16 * 2**20
"""Bytes: 100,000 tensors. The safetensors library allows six times as many, which would take
gigabytes when they are parsed."""
MOST_DIMENSIONS = 8
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
"""Where the library says the system's number of an error, which it has in words alone."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


class WeightsFileError(ValueError):
    """A file that is not a complete safetensors file; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file, as its header tells of it. `start` counts from the header's end."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.start + self.elements * self.dtype.itemsize


def read_header(file: HashedFile) -> tuple[StoredTensor, ...]:
    """The tensors of a file that was just opened, in the order in which they follow. Raises
    WeightsFileError."""
    told = file.take_all(8)
    if len(told) < 8:
        raise WeightsFileError(f"it has {len(told)} bytes, and the length of a header takes 8")
    length = int.from_bytes(told, "little")
    if length > LARGEST_HEADER:
        raise WeightsFileError(
            f"it announces a header of {length:,} bytes, {LARGEST_HEADER:,} are the most"
        )
    raw = file.take_all(length)
    if len(raw) < length:
        raise WeightsFileError(f"it ends after {len(raw):,} bytes of a header of {length:,}")
    try:
        document = parse_json(raw)
    except ValueError as error:
        raise WeightsFileError(f"its header is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise WeightsFileError("its header is not a JSON object")
    document.pop("__metadata__", None)
    tensors = [_stored(name, entry) for name, entry in document.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            raise WeightsFileError(
                f"{tensor.name} begins at {tensor.start:,}, and what is before it ends at {end:,}"
            )
        end = tensor.end
    return tuple(tensors)


def check_size(file: HashedFile, stored: Sequence[StoredTensor]) -> None:
    """Raise WeightsFileError unless a file of which only the header was read ends with the last of
    its tensors."""
    has, needs = file.size - file.taken, stored[-1].end if stored else 0
    if has < needs:
        ends = next(tensor for tensor in stored if tensor.end > has)
        raise WeightsFileError(
            f"it ends within {ends.name}: its tensors take {needs:,} bytes, and it has {has:,}"
        )
    if has > needs:
        raise WeightsFileError("there is more behind the last of its tensors")


def read_elements(
    file: HashedFile,
    tensor: StoredTensor,
    into: Tensor,  # of its shape, contiguous; of any dtype, on any device
    see: Callable[[Tensor], None],
) -> None:
    """Read the elements of the tensor that follows. `see` gets each part of them before it is
    copied. Raises WeightsFileError where the file ends."""
    flat, done, width = into.view(-1), 0, tensor.dtype.itemsize
    while done < tensor.elements:
        count = min(PIECE // width, tensor.elements - done)
        raw = file.take(count * width)
        if len(raw) < count * width:
            raise WeightsFileError(f"it ends within {tensor.name}")
        part = torch.frombuffer(raw, dtype=tensor.dtype)
        see(part)
        flat[done : done + count].copy_(part)
        done += count


def write_weights(
    path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, each contiguous and on the CPU, as a safetensors file, for its owner alone
    (`share_files` of `model/files.py`). Raises OSError where the disk does not take it."""
    try:
        save_file(dict(weights), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        if (number := SYSTEM_ERROR.search(str(error))) is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code)) from error


def _stored(name: str, entry: Any) -> StoredTensor:
    """An entry of a header, if it is one."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsFileError(
            f"its header has {str(entry)[:100]!r} for {name}; expected dtype, shape and two "
            "data_offsets"
        ) from error
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise WeightsFileError(f"{name} has the dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not (
        isinstance(shape, list)
        and len(shape) <= MOST_DIMENSIONS
        and all(type(count) is int and 0 <= count < 2**63 for count in (*shape, start, end))
    ):
        raise WeightsFileError(
            f"{name} has the shape {str(shape)[:100]} at {str(start)[:20]} to {str(end)[:20]}; "
            f"expected whole numbers, at most {MOST_DIMENSIONS} of them in a shape"
        )
    tensor = StoredTensor(name, DTYPES[dtype], tuple(shape), start)
    if tensor.end != end:
        raise WeightsFileError(
            f"{name}, {shape} of {dtype}, lies at {start:,} to {end:,}: it takes "
            f"{tensor.elements} times {tensor.dtype.itemsize} bytes"
        )
    return tensor
