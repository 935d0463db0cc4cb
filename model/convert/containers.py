"""Containers: recognizes the format of a weight file, mainly by its first bytes.

Reads the tensors in NumPy's `.npz` files and in JSON files with nested lists. `pt_file.py` reads
torch's files, `llama2c.py` reads llama2.c's files, and `state_file.py` finds the state dict. Code
in a file is never run.
"""

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.source_file import require_source, source_json

Container = Literal["torch", "safetensors", "npz", "json", "llama2.c"]

LLAMA2C_MAGIC = b"24ka"  # 0x616b3432, little-endian
UNPACKED_TIMES = 64
"""An `.npz` file may unpack to at most this many times its size, plus UNPACKED_BYTES."""
UNPACKED_BYTES = 64 * 2**20
"""An unpacked size of at most this many bytes is always allowed."""
HEADER_BYTES = 100 * 2**20
"""Maximum size of a safetensors header, in bytes; the same as the library's limit."""
_OTHERS: Mapping[bytes, str] = {
    b"GGUF": "a GGUF file of llama.cpp, which can be exported but not imported: import the Hugging "
    "Face folder or the .pt file that it was made from",
    b"\x89HDF": "an HDF5 file (Keras): load it, and save the arrays with "
    "numpy.savez('weights.npz', **arrays)",
    b"\x1f\x8b": "compressed with gzip: unpack it first",
    b"\x93NUMPY": "a single array of NumPy: save all arrays of the model with "
    "numpy.savez('weights.npz', **arrays)",
    b"7z\xbc\xaf": "a 7z archive: unpack it first",
    b"\xfd7zXZ": "compressed with xz: unpack it first",
    b"version https://git-lfs": "a pointer of Git LFS, not the file: fetch it with git lfs pull",
}
"""Descriptions of formats that are not supported, by their first bytes."""


def container_of(path: Path) -> Container:
    """The format of a file; "torch" if no other format is recognized. Raises ConvertError for a
    known format that is not supported."""
    require_source(path)
    with path.open("rb") as file:
        head = file.read(64)
    for begin, description in _OTHERS.items():
        if head.startswith(begin):
            raise ConvertError(f"{path} ({path.stat().st_size:,} bytes) is {description}")
    if path.suffix == ".safetensors":
        return "safetensors"
    if head[:4] == b"PK\x03\x04":
        return "npz" if _holds_arrays(path) else "torch"
    if head[:4] == LLAMA2C_MAGIC:
        return "llama2.c"
    if path.suffix.lower() == ".json" or head.lstrip()[:1] == b"{":
        return "json"
    if len(head) > 9 and struct.unpack("<Q", head[:8])[0] < HEADER_BYTES and head[8:10] == b'{"':
        return "safetensors"
    return "torch"


def _holds_arrays(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error):
        return False  # reported by the reader of torch's files


def read_npz(path: Path) -> dict[str, Any]:
    """Read the arrays of an `.npz` file as tensors. Raises ConvertError."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        size = path.stat().st_size
        if unpacked > UNPACKED_TIMES * size + UNPACKED_BYTES:
            raise ConvertError(
                f"{path} has {size:,} bytes, but would unpack to {unpacked:,} bytes: it is damaged"
            )
        with np.load(path, allow_pickle=False) as arrays:
            values = {name.replace("/", "."): _value(arrays[name], path) for name in arrays.files}
            if len(values) < len(arrays.files):
                raise ConvertError(f"{path} has arrays whose names differ only in / and .")
    except ConvertError:
        raise
    except Exception as error:  # damaged bytes make zipfile, zlib and NumPy fail in many ways
        pickled = "allow_pickle" in str(error)
        reason = (
            "it holds pickled objects; save plain arrays, one name each"
            if pickled
            else f"it is damaged ({type(error).__name__}: {error}): copy it again"
        )
        raise ConvertError(f"{path} is an .npz file that cannot be read: {reason}") from error
    return _as_state(values)


def _value(array: np.ndarray[Any, Any], path: Path) -> Any:
    """An array as a tensor. An array without axes becomes its value, and an array of strings
    becomes a list. Raises ConvertError, which names `path`, for a type of another library."""
    if array.ndim == 0:
        return array.item()
    if array.dtype.kind in "US":
        return array.astype(str).tolist()
    if array.dtype.kind == "V":
        raise ConvertError(
            f"{path} has arrays of {array.dtype}, a type that NumPy does not know, such as JAX's "
            "bfloat16: save them with .astype('float32')"
        )
    return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))


def read_json_weights(path: Path) -> dict[str, Any]:
    """Read the tensors in a JSON file that stores them as nested lists of numbers. Raises
    ConvertError."""
    document = source_json(path)
    if not isinstance(document, dict):
        raise ConvertError(f"{path} is JSON, but not an object whose members are lists of numbers")
    flat: dict[str, Any] = {}
    _flatten(document, "", flat, 0)
    if not any(isinstance(value, Tensor) and value.dim() > 1 for value in flat.values()):
        raise ConvertError(
            f"{path} is JSON without weights: no member is a list of lists of numbers. Expected a "
            "weight file (.pt, .pth, .bin, .npz, .safetensors) or its folder"
        )
    return _as_state(flat) | {
        name: value for name, value in document.items() if _is_text(value) or not _nested(value)
    }


def _nested(value: Any) -> bool:
    return isinstance(value, dict | list)


def _is_text(value: Any) -> bool:
    """True for a value that may be a vocabulary: a list of strings, or a dictionary that maps
    strings to ids or ids to strings."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(parts) and (
        all(isinstance(part, str) for part in parts)
        or (isinstance(value, dict) and all(type(part) is int for part in parts))
    )


def _flatten(value: Any, name: str, flat: dict[str, Any], depth: int) -> None:
    """Collect the lists of numbers as tensors, by their paths. The keys of a path are joined by
    dots."""
    if isinstance(value, list) and (tensor := _tensor(value)) is not None:
        flat[name] = tensor
    elif depth < 6 and _nested(value) and not _is_text(value):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            _flatten(inner, f"{name}.{key}" if name else str(key), flat, depth + 1)


def _tensor(value: list[Any]) -> Tensor | None:
    first: Any = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, bool) or not isinstance(first, int | float):
        return None
    try:
        array = np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):  # lists of unequal lengths, or other values
        return None
    return torch.from_numpy(array).float() if 1 <= array.ndim <= 3 else None


def _as_state(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move the tensors to the key "weights". If all their names have the same first part, that part
    is removed."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    firsts = {name.partition(".")[0] for name in tensors}
    if len(firsts) == 1 and all("." in name for name in tensors):
        tensors = {name.partition(".")[2]: value for name, value in tensors.items()}
    others = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    return {"weights": tensors, **others}
