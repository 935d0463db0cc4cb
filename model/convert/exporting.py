"""Export: writes a checkpoint as a Hugging Face folder or a GGUF file.

Files are written under a temporary name and then renamed. Padding rows are dropped. `family.py`
chooses the architecture, `exportable.py` lists everything that prevents an export, and
`hf/export.py` and `gguf_file.py` write the formats.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.load import load_weights, stored_dtype
from logitd.model.convert.exportable import gguf_objections, hf_objections, require
from logitd.model.convert.family import family_of
from logitd.model.convert.family import objections as shape_objections
from logitd.model.convert.gguf_file import write_gguf
from logitd.model.convert.hf.export import write_folder
from logitd.model.dtypes import DTypeName
from logitd.model.files import atomic_folder, require_new, whole_file, written_to

TO = Literal["hf", "gguf"]


def export_model(
    checkpoint: Path,
    destination: Path,
    *,
    to: TO,
    dtype: DTypeName = "auto",
    pre: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Export a checkpoint to `destination`, a folder or a GGUF file. If the export fails, no files
    are left there.

    `dtype` is the dtype of the written weights; "auto" keeps the checkpoint's dtype. `pre` is used
    only for GGUF (see `write_gguf`). `log` is called with each note for the user. Raises
    ConvertError if the model cannot be exported, CheckpointError if the checkpoint is invalid,
    DeviceError if the model does not fit into memory, and FileError if `destination` exists or
    cannot be written.
    """
    require_new(destination)
    info = read_checkpoint(checkpoint)
    trained_here = "format" not in info.training.data  # an import's record has its format
    remedy = "; train it again with --exportable"
    again = remedy if trained_here and shape_objections(info.config) else ""
    if to == "hf":
        require(
            hf_objections(info.config, info.tokenizer), f"; the model cannot be exported{again}"
        )
        family = family_of(info.config, info.tokenizer.pattern)
    else:
        require(gguf_objections(info.config, info.tokenizer, pre), again)
        family = family_of(info.config)
    stored = stored_dtype(info) if dtype == "auto" else getattr(torch, dtype)
    gpt = load_weights(info, device=torch.device("cpu"), dtype=stored)
    with written_to(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        if to == "hf":
            with atomic_folder(destination) as folder:
                write_folder(folder, info, gpt, family, log)
        else:
            with whole_file(destination) as file:
                write_gguf(Path(file.name), info, gpt, family, pre)
