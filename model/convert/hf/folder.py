"""Weights of a Hugging Face folder: reads `model.safetensors`, or else `pytorch_model.bin`. Each
may be one file or several shards with an index. `config.py` interprets the weights."""

from pathlib import Path

from logitd.model.convert.foreign import ConvertError, StateDictReader
from logitd.model.convert.shards import INDEX, is_index
from logitd.model.convert.state_file import named_tensors, read_tensors

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter (PEFT), which transformers applies to the weights next to it."""


def refuse_adapter(source: Path) -> None:
    """Raise ConvertError if a folder holds an adapter, or if a file belongs to one. A file with
    Hugging Face's name means its folder."""
    if source.is_file() and (source.name in (CONFIG, WEIGHTS, PICKLE) or is_index(source)):
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
    is opened; the name may be that of an index. Raises ConvertError."""
    for name in (named, WEIGHTS, PICKLE):
        for path in (folder / name, folder / f"{name}{INDEX}"):
            if path.is_file():
                tensors = named_tensors(str(path), read_tensors(path))
                return StateDictReader(str(folder), tensors)
    raise ConvertError(
        f"{folder} holds neither {WEIGHTS} nor {PICKLE}, nor an index of shards (*{INDEX}); save "
        "the model with transformers: save_pretrained(folder)"
    )
