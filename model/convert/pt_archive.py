"""torch's archives: what their list of files says, held against the tensors that were read.

A tensor's values are a file of the zip archive of torch.save, and its shape is in another. torch
maps the former without looking whether it is compressed or as long as the latter says, and gives
whatever bytes lie there. A shape may also repeat a few values billions of times. Knows nothing of
pickles (`pt_file.py`).
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
"""What a tensor may take that repeats what is stored: masks do."""
DEPTH = 8
"""Of dictionaries and lists in which tensors are looked for."""


@dataclass(frozen=True, slots=True)
class Archive:
    """What the list of an archive's files says.

    unpacked    bytes of all of them
    data        bytes of each that holds a tensor's values, the largest first
    compressed  whether one of these is
    """

    unpacked: int
    data: tuple[int, ...]
    compressed: bool


def read_archive(path: Path) -> Archive:
    """Read the list of files. Raises what `zipfile` does: BadZipFile, OSError, ValueError,
    NotImplementedError or struct.error."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    data = [entry for entry in entries if Path(entry.filename).parent.name == "data"]
    return Archive(
        unpacked=sum(entry.file_size for entry in entries),
        data=tuple(sorted((entry.file_size for entry in data), reverse=True)),
        compressed=any(entry.compress_type != zipfile.ZIP_STORED for entry in data),
    )


def check_tensors(path: Path, loaded: Any, archive: Archive | None) -> None:
    """Raise ConvertError for tensors that have more values than the file holds. `archive` is None
    for files from before torch 1.6, which are none."""
    stored: dict[int, int] = {}  # bytes by address
    for name, tensor in _tensors(loaded):
        if tensor.layout is not torch.strided or tensor.is_meta:
            continue  # of several tensors, or of none
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = max(stored.get(storage.data_ptr(), 0), storage.nbytes())
        size = tensor.numel() * tensor.itemsize
        if size > max(storage.nbytes(), REPEATED_BYTES):
            raise ConvertError(
                f"{path}: {name} has the shape {tuple(tensor.shape)}, which takes {size:,} bytes, "
                f"and {storage.nbytes():,} of it are in the file: the rest would be repeated"
            )
    if archive is None:
        return
    # Which file is whose is not known here; as many have to be as long as as many tensors need.
    for needed, held in zip_longest(
        sorted(stored.values(), reverse=True), archive.data, fillvalue=0
    ):
        if needed > held:
            raise ConvertError(
                f"{path} is damaged: a tensor takes {needed:,} bytes, and the file of the archive "
                f"that should hold them has {held:,}: copy it again"
            )


def _tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested containers, by the keys that lead to them."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth < DEPTH and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif depth < DEPTH and isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(inner, f"{name}[{index}]", depth + 1)
