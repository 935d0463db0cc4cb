"""Weights file: reads a safetensors file tensor by tensor into existing memory.

The safetensors library would hold the whole file in memory and copy it, or map it, so that a
running model would see changes to the file. Here at most two pieces are in memory
(`model/checkpoint/hashed_file.py`). Like the library, this module checks the length and the JSON of
the header, and refuses gaps between tensors. Files are written with the library.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from logitd.model.checkpoint.hashed_file import PIECE, HashedFile
from logitd.model.files import parse_json

LARGEST_HEADER = 16 * 2**20
"""Largest header in bytes, enough for 100,000 tensors. The safetensors library allows headers six
times as large, which take gigabytes to parse."""
MOST_DIMENSIONS = 8
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
"""Matches the operating system's error number in an error of the safetensors library. Only the text
of the message contains the number."""

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
    "C64": torch.complex64,
}


class WeightsFileError(ValueError):
    """Raised for an incomplete or invalid safetensors file; the message describes the fault."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `start` is its offset in bytes from the end of the header."""

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


class HeaderFile(Protocol):
    """A newly opened file of weights, such as a `HashedFile`."""

    @property
    def size(self) -> int: ...

    @property
    def taken(self) -> int: ...

    def take_all(self, count: int) -> bytes: ...


def read_header(file: HeaderFile) -> tuple[StoredTensor, ...]:
    """Read the descriptions of the tensors from a newly opened file, in file order. Raises
    WeightsFileError if the header is invalid, or if the file ends before or after its last
    tensor."""
    prefix = file.take_all(8)
    if len(prefix) < 8:
        raise WeightsFileError(f"it has {len(prefix)} bytes; the header's length alone takes 8")
    length = int.from_bytes(prefix, "little")
    if length > LARGEST_HEADER:
        raise WeightsFileError(
            f"it announces a header of {length:,} bytes; the limit is {LARGEST_HEADER:,}"
        )
    raw = file.take_all(length)
    if len(raw) < length:
        raise WeightsFileError(
            f"its header has {length:,} bytes, but the file ends after {len(raw):,} of them"
        )
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
                "tensors must follow each other without gaps or overlaps, but "
                f"{tensor.name} begins at byte {tensor.start:,} of the data instead of {end:,}"
            )
        end = tensor.end
    rest = file.size - file.taken
    if rest < end:
        cut = next(tensor for tensor in tensors if tensor.end > rest)
        raise WeightsFileError(
            f"it ends within {cut.name}: its tensors take {end:,} bytes, but it has only {rest:,}"
        )
    if rest > end:
        raise WeightsFileError("it has bytes after its last tensor")
    return tuple(tensors)


def read_elements(
    file: HashedFile,
    tensor: StoredTensor,
    into: Tensor,  # of the tensor's shape, contiguous; any dtype and device
    see: Callable[[Tensor], None],
) -> None:
    """Read the elements of the next tensor. They are read in parts, and `see` is called with each
    part before it is copied. Raises WeightsFileError if the file ends within the tensor."""
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
    """Write contiguous CPU tensors as a safetensors file that only its owner can read (see
    `share_files` in `model/files.py`). Raises OSError."""
    try:
        save_file(dict(weights), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        if (number := SYSTEM_ERROR.search(str(error))) is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code)) from error


def _stored(name: str, entry: Any) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsFileError(
            f"its header has {str(entry)[:100]!r} for {name}; expected dtype, shape and two "
            "data_offsets"
        ) from error
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise WeightsFileError(f"{name} has the dtype {dtype!r}; expected {', '.join(DTYPES)}")
    if not (
        isinstance(shape, list)
        and len(shape) <= MOST_DIMENSIONS
        and all(type(count) is int and 0 <= count < 2**63 for count in (*shape, start, end))
    ):
        raise WeightsFileError(
            f"{name} has the shape {str(shape)[:100]} and the bytes {str(start)[:20]} to "
            f"{str(end)[:20]}; expected whole numbers and at most {MOST_DIMENSIONS} dimensions"
        )
    tensor = StoredTensor(name, DTYPES[dtype], tuple(shape), start)
    if tensor.end != end:
        raise WeightsFileError(
            f"{name} has the shape {shape}, the dtype {dtype} and the bytes {start:,} to {end:,}, "
            f"but it needs {tensor.elements} times {tensor.dtype.itemsize} bytes"
        )
    return tensor
