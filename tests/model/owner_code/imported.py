"""Checkpoints of the owners' classes, imported with their code."""

import shutil
from pathlib import Path
from typing import Any

import torch

from logitd.model.checkpoint.checkpoint import TrainingRecord, save_checkpoint
from logitd.model.convert.by_code import CodeOptions, import_by_code
from logitd.model.convert.by_role.owner_code import parse_owner_code
from logitd.model.owner_code.config import CodeConfig
from logitd.model.text.tokenizer import Tokenizer
from tests.model.owner_code import classes
from tests.model.owner_code.classes import CONTEXT, VOCABULARY, made

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"


def source(kind: str, folder: Path, seed: int = 1) -> tuple[Path, str]:
    """Write the code of a class, and its state dict with its vocabulary. Returns the path of the
    state dict, and the class as --code names it."""
    shutil.copy(classes.__file__, folder / "owner.py")
    settings = {"vocab_size": VOCABULARY, "block_size": CONTEXT}
    state = {"model": made(kind, seed).state_dict(), "config": settings}
    path = folder / f"{kind}.pt"
    torch.save({**state, "itos": dict(enumerate(LETTERS))}, path)
    return path, f"{folder / 'owner.py'}:{kind}"


def imported(kind: str, folder: Path, lens: tuple[str, str] | None = None, seed: int = 1) -> Path:
    """Import the class as a checkpoint, in a new process."""
    path, code = source(kind, folder, seed)
    options = CodeOptions(code=parse_owner_code(code), answers={}, lens=lens)
    destination = folder / f"imported-{kind}-{seed}"
    import_by_code(path, destination, options, log=lambda line: None)
    return destination


def written(folder: Path, code: str = "raise SystemExit", **fields: Any) -> Path:
    """Write a checkpoint with code, without running the code."""
    config = CodeConfig.from_dict(
        {
            "vocab_size": VOCABULARY, "rows": VOCABULARY, "context_length": CONTEXT,
            "parameters": 4, "file": "owner.py", "expression": "Model",
            "values": {"top": {}, "over": {}, "values": {}},
            "deterministic": True, "padding_is_harmless": True, "has_state": False, **fields,
        }
    )  # fmt: skip
    path = folder / "written"
    save_checkpoint(
        path,
        config=config,
        weights={"weight": torch.ones(4)},
        tokenizer=Tokenizer.without_text(VOCABULARY),
        training=TrainingRecord(
            step=0, tokens=0, val_loss=None, val_bits_per_byte=None, data={}, created="now"
        ),
        card="",
        sources={"owner.py": code.encode()},
    )
    return path
