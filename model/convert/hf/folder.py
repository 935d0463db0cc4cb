"""Weights of a Hugging Face folder: reads `model.safetensors`, or else `pytorch_model.bin`. Each
may be one file or several shards with an index. `config.py` interprets the weights."""

from pathlib import Path

import torch
from torch import Tensor

from logitd.model.convert.foreign import ConvertError, StateDictReader
from logitd.model.convert.source_file import source_object
from logitd.model.convert.state_file import named_tensors, read_tensors

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter (PEFT), which transformers applies to the weights next to it."""
INDEX = ".index.json"
"""Suffix of the file that lists the shards. It is appended to the name of an unsharded weight
file."""


def refuse_adapter(source: Path) -> None:
    """Raise ConvertError if a folder holds an adapter, or if a file belongs to one. A weight file
    with Hugging Face's name means its folder."""
    if source.is_file() and source.name in (CONFIG, WEIGHTS, PICKLE):
        source = source.parent
    names = [source.name] if source.is_file() else [path.name for path in source.glob("adapter_*")]
    if found := sorted(set(names) & set(ADAPTER_FILES)):
        raise ConvertError(
            f"{source} is or holds an adapter ({', '.join(found)}), which is not imported: merge "
            "it with its base, model.merge_and_unload().save_pretrained(folder) in PEFT, and "
            f"import that folder; or, to import weights without it, move {', '.join(found)} to "
            "another folder"
        )


def open_state_dict(folder: Path, named: str = WEIGHTS) -> StateDictReader:
    """Open the tensors of a folder. If the folder has several weight files, the one called `named`
    is opened. Raises ConvertError."""
    for name in (named, WEIGHTS, PICKLE):
        index = folder / f"{name}{INDEX}"
        if (folder / name).is_file():
            tensors = named_tensors(str(folder / name), read_tensors(folder / name))
            return StateDictReader(str(folder), tensors)
        if index.is_file():
            return StateDictReader(str(folder), _shards(index))
    raise ConvertError(
        f"{folder} holds neither {WEIGHTS} nor {PICKLE}, nor an index of shards (*{INDEX}); save "
        "the model with transformers: save_pretrained(folder)"
    )


def _shards(index: Path) -> dict[str, Tensor]:
    homes = source_object(index).get("weight_map")
    if not isinstance(homes, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in homes.values()
    ):
        raise ConvertError(f"{index} has no valid weight_map, which names the file of each tensor")
    tensors: dict[str, Tensor] = {}
    first: dict[str, tuple[str, Tensor]] = {}
    for file in dict.fromkeys(homes.values()):
        path = index.parent / file
        held = named_tensors(str(path), read_tensors(path))
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
