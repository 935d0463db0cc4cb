"""Reads a checkpoint's files, and changes them as a broken trainer or disk would."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from logitd.model.checkpoint.checkpoint import CONFIG, RANKS, WEIGHTS, CheckpointError
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.transformer.gpt import GPT

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32) -> GPT:
    return load_checkpoint(path, device=CPU, dtype=dtype)[1]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def edit_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((path / CONFIG).read_text())
    change(document)
    (path / CONFIG).write_text(json.dumps(document))


def rehash(path: Path) -> None:
    """Replace the recorded hashes with the hashes of the current files."""
    hashes = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in (WEIGHTS, RANKS)
    }
    edit_config(path, lambda document: document["files"].update(hashes))


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change tensors as a broken trainer would: the hashes still match."""
    weights = load_file(path / WEIGHTS)
    change(weights)
    save_file(weights, path / WEIGHTS)
    rehash(path)


def refuse(path: Path, message: str) -> None:
    """Assert that loading fails with a message that names the path and matches a pattern."""
    with pytest.raises(CheckpointError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)
