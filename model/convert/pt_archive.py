"""Archives of torch.save: checks the sizes of tensors against the archive's list of files.

A zip archive stores the values of each tensor in a separate file, but the shapes of all tensors in
one other file. torch maps the values into memory without checking that their file is uncompressed
and long enough for the shape. If the file is too short, the tensor contains the bytes that follow
it in the archive. A tensor's shape and strides may also repeat a few stored values billions of
times. `pt_file.py` reads the pickles.
"""

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.convert.foreign import ConvertError

REPEATED_BYTES = 64 * 2**20
"""Maximum size, in bytes, of a tensor that repeats stored values, as a mask may."""
DEPTH = 8
"""Number of levels of dictionaries and lists that are searched for tensors."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The sizes in an archive's list of files.

    unpacked    total size of all files when unpacked, in bytes
    data        sizes of the files with tensors' values, in bytes, largest first
    compressed  True if at least one of the files in `data` is compressed
    """

    unpacked: int
    data: tuple[int, ...]
    compressed: bool


def read_archive(path: Path) -> Archive:
    """Read an archive's list of files. Raises the same errors as `zipfile`: BadZipFile, OSError,
    ValueError, NotImplementedError or struct.error."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    data = [entry for entry in entries if Path(entry.filename).parent.name == "data"]
    return Archive(
        unpacked=sum(entry.file_size for entry in entries),
        data=tuple(sorted((entry.file_size for entry in data), reverse=True)),
        compressed=any(entry.compress_type != zipfile.ZIP_STORED for entry in data),
    )


def check_tensors(path: Path, loaded: Any, archive: Archive | None) -> None:
    """Raise ConvertError if a tensor has more values than the file stores for it. `archive` is None
    if the file was saved before torch 1.6."""
    stored: dict[int, int] = {}  # bytes by address
    for name, tensor in tensors_in(loaded):
        if tensor.layout is not torch.strided or tensor.is_meta:
            continue  # such tensors have several storages, or none
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = max(stored.get(storage.data_ptr(), 0), storage.nbytes())
        size = tensor.numel() * tensor.itemsize
        if size > max(storage.nbytes(), REPEATED_BYTES):
            raise ConvertError(
                f"{path}: {name} has the shape {tuple(tensor.shape)}, which takes {size:,} bytes, "
                f"but the file stores only {storage.nbytes():,} bytes for it: save a tensor that "
                "stores every value, such as tensor.contiguous()"
            )
    if archive is None:
        return
    # The list does not say which file belongs to which tensor, so sizes are compared in order.
    for needed, held in zip_longest(
        sorted(stored.values(), reverse=True), archive.data, fillvalue=0
    ):
        if needed > held:
            raise ConvertError(
                f"{path} is damaged: a tensor takes {needed:,} bytes, but its file in the archive "
                f"has only {held:,} bytes. Copy {path.name} again"
            )


def tensors_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers, each with the path of keys that leads to it."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth < DEPTH and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif depth < DEPTH and isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from tensors_in(inner, f"{name}[{index}]", depth + 1)
