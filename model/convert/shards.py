"""Shards: a model in several weight files, with an index that names the file of each tensor.

transformers and accelerate save large models this way. `state_file.py` reads the weight files.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.source_file import source_object

INDEX = ".index.json"
"""Suffix of the index. It is appended to the name of an unsharded weight file."""
_INDEX_NAME = re.compile(rf".+\.(pt|pth|bin|ckpt|safetensors){re.escape(INDEX)}")
_SHARD_NAME = re.compile(r".+-\d{5}-of-(?!00001)\d{5}")
_NUMBERED = re.compile(r"(?:.*[._-])?(?:consolidated|mp_rank|shard)[._-]?\d+[._-].*")
"""Names of shards without an index, such as those of Llama's original files and of Megatron."""


def is_index(path: Path) -> bool:
    """True if a path is a file with the name of an index."""
    return _INDEX_NAME.fullmatch(path.name) is not None and path.is_file()


def index_of(path: Path) -> Path | None:
    """The index, in the same folder, of several files of which this weight file is one; None if
    there is none. Raises ConvertError if an index is not valid."""
    for index in sorted(filter(is_index, path.parent.glob(f"*{INDEX}"))):
        files = set(_homes(index).values())
        if path.name in files and len(files) > 1:
            return index
    return None


def require_whole(path: Path) -> None:
    """Raise ConvertError if a weight file is one of several shards."""
    if (index := index_of(path)) is not None:
        raise ConvertError(
            f"{path} has only a part of the model's tensors: it is one of the shards that "
            f"{index.name} lists. Import the index: {index}"
        )
    if _SHARD_NAME.fullmatch(path.stem) or (_NUMBERED.fullmatch(path.name) and _has_like(path)):
        raise ConvertError(
            f"{path} has only a part of the model's tensors: its name says that it is one of "
            f"several shards, and no index (*{INDEX}) in its folder lists them. Save all weights "
            "in one file"
        )


def _has_like(path: Path) -> bool:
    """True if the folder has another file whose name differs only in its numbers."""
    names = [re.sub(r"\d+", "0", other.name) for other in path.parent.iterdir()]
    return names.count(re.sub(r"\d+", "0", path.name)) > 1


def shards_of(index: Path) -> list[Path]:
    """The weight files that an index names. Raises ConvertError if the index is not valid."""
    return [index.parent / file for file in dict.fromkeys(_homes(index).values())]


def read_shards(index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all shards that an index names. `read` returns the tensors of one file.
    Raises ConvertError if a tensor is missing, or if shards contradict each other."""
    homes = _homes(index)
    tensors: dict[str, Tensor] = {}
    first: dict[str, tuple[str, Tensor]] = {}
    for path in shards_of(index):
        file, held = path.name, read(path)
        for name, tensor in held.items():
            other, same = first.setdefault(name, (file, tensor))
            if same.dtype != tensor.dtype or not torch.equal(same, tensor):
                raise ConvertError(
                    f"{index.parent}: {name} differs between {other} and {file}; remove it from "
                    "one of them, or save the model again: model.save_pretrained(folder)"
                )
        # A tensor that the index does not name may still be a part of the model.
        tensors |= {name: held[name] for name in held if homes.get(name, file) == file}
    if absent := sorted(homes.keys() - tensors.keys()):
        raise ConvertError(
            f"{index} names {len(absent)} tensors that its files do not contain; the first is "
            f"{absent[0]}"
        )
    return tensors


def _homes(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    homes = source_object(index).get("weight_map")
    if not isinstance(homes, dict) or not all(
        isinstance(file, str) and Path(file).name == file and not file.endswith(INDEX)
        for file in homes.values()
    ):
        raise ConvertError(f"{index} has no valid weight_map, which names the file of each tensor")
    return homes
