"""Origin: what the record of an imported checkpoint says about the source.

`importing.py` and `by_code.py` write the checkpoint.
"""

import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import TrainingRecord
from logitd.model.convert.by_role.owner_code import OwnerCode
from logitd.model.convert.state_file import LOOKED_FOR
from logitd.model.convert.vocabulary.files import files_beside
from logitd.model.convert.vocabulary.named import named_file

DESCRIBING = (".json", ".yaml", ".yml", ".jinja")
"""Suffixes of the settings, vocabularies and chat templates in a model's folder."""


def fingerprint(source: Path, tokenizer: str | None = None) -> str:
    """A hash that distinguishes sources with the same name. It covers the names and contents of all
    weight files, of the settings and chat templates next to them, and of the vocabularies: the
    file that `tokenizer`, the value of --tokenizer, names, or else all that an import may find.
    A JSON file may be the configuration or the index of the weights in its folder."""
    folder = source if source.is_dir() else source.parent
    files = [source, *(path for path in folder.iterdir() if path.suffix in DESCRIBING)]
    if source.is_dir() or source.suffix == ".json":
        files += (path for path in folder.rglob("*") if path.suffix in LOOKED_FOR)
    named = None if tokenizer is None else named_file(tokenizer)
    files += files_beside(folder) if tokenizer is None else [] if named is None else [named]
    digest = hashlib.sha256()
    for path in sorted({path.absolute() for path in files if path.is_file()}):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(os.fsencode(f"{path.name} {content}\n"))
    return digest.hexdigest()[:16]


def record_of_import(
    source: Path,
    kind: str,
    tokenizer: str | None,
    facts: Mapping[str, Any],
    *,
    step: int,
    tokens: int = 0,
    val_loss: float | None,
) -> TrainingRecord:
    """The training record of an imported checkpoint: the source, further facts, and the training
    step, tokens and loss that the source states. `tokenizer` is the value of --tokenizer."""
    return TrainingRecord(
        step=step,
        tokens=tokens,
        val_loss=val_loss,
        val_bits_per_byte=None,
        data={
            "name": source.resolve().name,
            "fingerprint": fingerprint(source, tokenizer),
            "format": kind,
            "licence": "the source's license, which is not known here",
            **({} if tokenizer is None else {"tokenizer": tokenizer}),
            **facts,
        },
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def record_of_code(code: OwnerCode) -> dict[str, Any]:
    """The entries of a training record for the owner's code. The hash covers all Python files in
    its folder, the expression that creates the model, and the call that returns logits."""
    digest = hashlib.sha256(f"{code.expression}\n{code.call}".encode())
    for path in sorted(code.file.absolute().parent.glob("*.py")):
        digest.update(os.fsencode(path.name) + path.read_bytes())
    return {"code": str(code), "code_sha256": digest.hexdigest()[:16]}
