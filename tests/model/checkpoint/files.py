"""A checkpoint's files in the tests: read, changed as a broken trainer or disk would, and refused.

Does not cover adapters. `save_tiny_checkpoint` of the factories makes a whole checkpoint.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from logitd.model.checkpoint.checkpoint import (
    CONFIG,
    RANKS,
    WEIGHTS,
    CheckpointError,
    load_checkpoint,
)
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
    """Make the hashes those of the files as they are now."""
    hashes = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in (WEIGHTS, RANKS)
    }
    edit_config(path, lambda document: document["files"].update(hashes))


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change tensors as a broken trainer would: the hashes are right, the numbers are not."""
    weights = load_file(path / WEIGHTS)
    change(weights)
    save_file(weights, path / WEIGHTS)
    rehash(path)


def refuse(path: Path, message: str) -> None:
    """Loading fails; the message names the checkpoint's path and matches a pattern."""
    with pytest.raises(CheckpointError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)
