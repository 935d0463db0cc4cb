"""Tensors: reads NumPy arrays and checkpoint metadata from the server's safetensors replies.

The arrays are views of the reply's bytes, so a large reply is in memory only once. NumPy has no
bfloat16, so such values become float32, which is exact. The safetensors package is not used: it
copies each tensor, refuses bfloat16 without torch, and cannot read the metadata of a file in
memory.
"""

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from logitd.service.client.reading import WrongShape, read
from logitd.service.client.results import Checkpoint

Array = npt.NDArray[Any]

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's entry in the header. Offsets count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, ...]


class TensorFile:
    """A whole safetensors file. All methods raise WrongShape if the file is damaged."""

    def __init__(self, content: bytearray) -> None:
        size = int.from_bytes(content[:8], "little")
        if len(content) < 8 or size > len(content) - 8:
            raise WrongShape(f"the reply has {len(content)} bytes and is not a safetensors file")
        try:
            header = json.loads(content[8 : 8 + size])
        except (ValueError, RecursionError) as error:
            raise WrongShape(
                "the reply is not a safetensors file: its header is not JSON"
            ) from error
        self._header: dict[str, Any] = read(dict[str, Any], header, "the header")
        self._data = memoryview(content)[8 + size :]

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the file's order."""
        return [name for name in self._header if name != "__metadata__"]

    def array(self, name: str) -> Array:
        """The tensor of this name, as a view of the file's bytes."""
        if name not in self._header:
            raise WrongShape(f"{name} is missing")
        place: TensorPlace = read(TensorPlace, self._header[name], name)
        if place.dtype not in DTYPES:
            raise WrongShape(
                f"{name}.dtype is {place.dtype[:20]!r}; it should be one of {', '.join(DTYPES)}"
            )
        flat = self._numbers(name, place, np.dtype(DTYPES[place.dtype]))
        try:
            array = flat.reshape(place.shape)
        except (ValueError, OverflowError) as error:  # more than 64 axes, or [0, 2**64]
            raise WrongShape(
                f"{name}.shape has {len(place.shape)} axes; NumPy cannot create such an array"
            ) from error
        return _widened(array) if place.dtype == "BF16" else array

    def _numbers(self, name: str, place: TensorPlace, dtype: np.dtype[Any]) -> Array:
        """The tensor as a flat array. Raises WrongShape if its offsets do not fit its shape or the
        file."""
        match place.data_offsets:
            case (start, end) if (
                0 <= start <= end <= len(self._data)
                and all(length >= 0 for length in place.shape)
                and end - start == prod(place.shape) * dtype.itemsize
            ):
                numbers = np.frombuffer(self._data[start:end], dtype=dtype)
                return np.require(numbers, requirements=["ALIGNED"])
        raise WrongShape(
            f"{name} has offsets that do not match its shape, or point outside the reply"
        )

    @property
    def stage(self) -> str:
        stage: str = read(str, self._metadata("stage"), "stage")
        return stage

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint described by the metadata."""
        name, step, val_loss, weights_sha256 = (
            self._metadata(f"checkpoint_{field}")
            for field in ("name", "step", "val_loss", "weights_sha256")
        )
        try:
            loss = None if val_loss == "None" else float(val_loss)
            return Checkpoint(name, int(step), loss, weights_sha256, self._code)
        except ValueError as error:
            raise WrongShape(
                f"checkpoint_step is {step[:20]!r} and checkpoint_val_loss is {val_loss[:20]!r}; "
                "both should be numbers"
            ) from error

    @property
    def _code(self) -> str | None:
        key = "checkpoint_code"
        return self._metadata(key) if key in self._header.get("__metadata__", {}) else None

    def _metadata(self, name: str) -> str:
        metadata = read(dict[str, str], self._header.get("__metadata__", {}), "__metadata__")
        if name not in metadata:
            raise WrongShape(f"__metadata__.{name} is missing")
        return str(metadata[name])


def _widened(bits: Array) -> npt.NDArray[np.float32]:
    """Convert bfloat16 numbers to float32. `bits` holds each number's bits as a uint16."""
    return (bits.astype("<u4") << 16).view("<f4")
