"""Weights of a Hugging Face folder: reads `model.safetensors`, or else `pytorch_model.bin`. Each
may be one file or several shards with an index. `config.py` interprets the weights."""

from pathlib import Path

from torch import Tensor

from logitd.model.convert.foreign import ConvertError, StateDictReader
from logitd.model.convert.source_file import source_object
from logitd.model.convert.state_file import named_tensors, read_tensors

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
"""Suffix of the file that lists the shards. It is appended to the name of an unsharded weight
file."""


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
    for file in dict.fromkeys(homes.values()):
        path = index.parent / file
        held = named_tensors(str(path), read_tensors(path))
        # A tensor that the index does not name may still be a part of the model.
        tensors |= {name: held[name] for name in held if homes.get(name, file) == file}
    if absent := sorted(homes.keys() - tensors.keys()):
        raise ConvertError(
            f"{index} names {len(absent)} tensors that its files do not contain; the first is "
            f"{absent[0]}"
        )
    return tensors
