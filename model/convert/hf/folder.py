"""Files of a Hugging Face folder: `config.json` and the tensors.

Weights are `model.safetensors`, or else `pytorch_model.bin`, each in one file or in shards with an
index. Says nothing about what they mean (`config.py`).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from logitd.model.convert.foreign import ConvertError, StateDictReader
from logitd.model.convert.pt_file import read_pt
from logitd.model.convert.source_file import require_source, source_json
from logitd.model.convert.state_file import named_tensors

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
"""Suffix of the list of shards, behind the name of a single file."""


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ConvertError."""
    document = source_json(path)
    if not isinstance(document, dict):
        raise ConvertError(f"{path} is not a JSON object")
    return document


def open_state_dict(folder: Path) -> StateDictReader:
    """The tensors of `model.safetensors`, or of the shards that its index names; else those of
    `pytorch_model.bin`, in the same way."""
    single = next(
        (name for name in (WEIGHTS, PICKLE)
         if any((folder / f"{name}{end}").is_file() for end in ("", INDEX))),
        None,
    )  # fmt: skip
    if single is None:
        raise ConvertError(
            f"{folder} holds neither {WEIGHTS} nor {PICKLE}, nor the {INDEX} of one; save the "
            "model with transformers: save_pretrained(folder)"
        )
    homes: dict[str, str] | None = None
    files = [single]
    if not (folder / single).is_file():
        homes = _shards(folder / f"{single}{INDEX}")
        files = list(dict.fromkeys(homes.values()))
    tensors: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        opened = _safetensors(folder / file) if single == WEIGHTS else _pickled(folder / file)
        tensors |= {name: take for name, take in opened.items()
                    if homes is None or homes.get(name) == file}  # fmt: skip
    if homes is not None and (absent := sorted(set(homes) - set(tensors))):
        raise ConvertError(
            f"{folder / f'{single}{INDEX}'} names {len(absent)} tensors that their files do not "
            f"hold, the first is {absent[0]}"
        )
    return StateDictReader(str(folder), tensors, lambda name: tensors[name]())


def _shards(index: Path) -> dict[str, str]:
    """For each tensor the file that holds it."""
    homes = read_object(index).get("weight_map")
    if not isinstance(homes, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in homes.values()
    ):
        raise ConvertError(f"{index} has no weight_map from tensors to files beside it")
    return homes


def _safetensors(path: Path) -> dict[str, Callable[[], Tensor]]:
    """What reads each tensor of a safetensors file."""
    require_source(path)
    try:
        opened: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConvertError(f"{path} is not a complete safetensors file: {error}") from error

    def read(name: str) -> Tensor:
        try:
            tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, ValueError, TypeError, AttributeError) as error:
            raise ConvertError(f"{path}: {name} cannot be read: {error}") from error
        return tensor

    return {name: partial(read, name) for name in opened.keys()}  # noqa: SIM118  # no iterator


def _pickled(path: Path) -> dict[str, Callable[[], Tensor]]:
    """The same of a file that `torch.save` wrote."""
    state = named_tensors(str(path), read_pt(path, keep="model.state_dict()"))
    return {name: partial(state.__getitem__, name) for name in state}
