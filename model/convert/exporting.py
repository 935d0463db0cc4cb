"""Export: writes a checkpoint as a Hugging Face folder or a GGUF file.

Files are written under a temporary name and then renamed. Padding rows are dropped. `family.py`
chooses the architecture, `exportable.py` lists everything that prevents an export, and
`hf/export.py` and `gguf_file.py` write the formats.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.load import load_weights, stored_dtype
from logitd.model.convert.exportable import gguf_objections, hf_objections, require
from logitd.model.convert.family import family_of, folder_family_of
from logitd.model.convert.family import objections as shape_objections
from logitd.model.convert.gguf_file import write_gguf
from logitd.model.convert.hf.export import write_folder
from logitd.model.dtypes import DTypeName
from logitd.model.files import folder_aside, require_new, share_files, written_to

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
    again = "; train it again with --exportable" if shape_objections(info.config) else ""
    if to == "hf":
        require(
            hf_objections(info.config, info.tokenizer), f"; the model cannot be exported{again}"
        )
        family = folder_family_of(info.config, info.tokenizer.pattern)
    else:
        require(gguf_objections(info.config, info.tokenizer, pre), again)
        family = family_of(info.config)
    stored = stored_dtype(info) if dtype == "auto" else getattr(torch, dtype)
    gpt = load_weights(info, device=torch.device("cpu"), dtype=stored)
    with written_to(destination), _aside(destination) as aside:
        written = aside if to == "hf" else aside / "model.gguf"
        if to == "hf":
            write_folder(written, info, gpt, family, log)
        else:
            write_gguf(written, info, gpt, family, pre)
        share_files(aside)
        written.rename(destination)


@contextmanager
def _aside(destination: Path) -> Iterator[Path]:
    destination.parent.mkdir(parents=True, exist_ok=True)
    aside = folder_aside(destination)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
