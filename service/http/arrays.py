"""Arrays: writes .npy, safetensors and nested JSON lists in parts.

.npy files have format version 1.0. A safetensors file is a header with names, types and offsets,
followed by the bytes of the tensors. Shapes are known before the elements, so the header can be
written first, and each element is written as soon as it is computed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from logitd.model.operations.body import DType
from logitd.service.errors import bad_request

Array = npt.NDArray[Any]

SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127}
"""Largest finite number of a dtype."""

PART_BYTES = 2**18
"""Number of bytes written to the socket at a time. The event loop and the engine run between two
parts."""
JSON_ELEMENTS = 2**14
"""Arrays of at most this many elements are converted to JSON in one piece. So is every array with
one axis."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a safetensors file; `dtype` is a key of SAFETENSORS_NAMES."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def npy_header(shape: tuple[int, ...], dtype: DType) -> bytes:
    """The header of an .npy file. The elements follow in C order, little-endian."""
    descr = np.dtype(dtype).newbyteorder("<").str
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    padding = -(10 + len(text) + 1) % 64
    header = text + " " * padding + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin-1")


def safetensors_header(tensors: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file. The tensors follow in the given order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (offset, offset + tensor.nbytes),
        }
        offset += tensor.nbytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def encoded(values: Array, dtype: DType) -> Array:
    """Convert float32 values to `dtype`. The result is contiguous; bfloat16 is returned as uint16
    with the same bits. Raises ApiError if a finite value would become infinite."""
    if dtype == "float32":
        return np.ascontiguousarray(values, dtype="<f4")
    if dtype == "float16":
        with np.errstate(over="ignore"):
            narrow = np.ascontiguousarray(values, dtype="<f2")
        infinite = np.isinf(narrow)
    else:
        bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
        # Round to nearest, ties to even; a NaN must not be rounded to infinity.
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        narrow = np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2")
        infinite = (narrow & 0x7FFF) == 0x7F80
    if (lost := values[infinite & np.isfinite(values)]).size:
        raise bad_request(
            f"dtype is {dtype}, whose largest number is {LARGEST[dtype]:g}, but a value of the "
            f"reply is {lost[0]:g}; use float32",
            "dtype",
        )
    return narrow


def byte_parts(values: Array) -> Iterator[bytes]:
    """Yield the bytes of a contiguous array in parts."""
    view = values.reshape(-1).view(np.uint8).data  # the array is contiguous: no copy
    for start in range(0, len(view), PART_BYTES):
        yield bytes(view[start : start + PART_BYTES])


def json_parts(values: Array) -> Iterator[bytes]:
    """Yield an array as nested JSON lists in parts. Non-finite values become null."""
    if values.ndim == 1 or values.size <= JSON_ELEMENTS:
        yield orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY)
        return
    separator = b"["
    for inner in values:
        parts = json_parts(inner)
        yield separator + next(parts)
        yield from parts
        separator = b","
    yield b"]"
