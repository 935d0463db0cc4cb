"""State: saves the state of a run, so that a resumed run continues exactly.

The file `state/state.pt` holds the float32 weights (with `--lora` only the adapters'), their
average, the states of all optimizers, the counters, and the states of the step log and of the
divergence monitor. The file needs no position in the data and no random state, because batches and
dropout are functions of the seed and the step (`model/data/batches.py`). It is written under a
temporary name, synced and renamed, and read with `weights_only=True`, so reading never executes
code.

A resumed run has the same bits as an uninterrupted one if its environment equals the recorded one;
`differences` lists what changed. Checkpoints, which are for serving, are in
`model/checkpoint/checkpoint.py`.
"""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from logitd.model.device import Placement, describe
from logitd.model.files import require_regular, whole_file
from logitd.model.first_error import first_error
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.distributed.fsdp import gather_weights, is_sharded, scatter_weights
from logitd.model.training.distributed.ranks import ALONE, Ranks
from logitd.model.training.optim.average import Average
from logitd.model.training.optim.optimizers import Optimizers
from logitd.model.training.stopping.length import Counters
from logitd.model.transformer.gpt import GPT

VERSION = 2
REVISION = 2
"""Version of the trainer's arithmetic and order of batches. Version 1 did not shuffle the
documents, and made five Newton-Schulz iterations."""

DAMAGE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)
"""Errors that a damaged state file may cause."""


class SavedState(BaseModel):
    """The contents of the state file, except its version."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    counters: Counters
    environment: dict[str, Any]
    weights: dict[str, Tensor]
    average: dict[str, Any] | None = None
    optimizers: dict[str, dict[str, Any]]
    reports: dict[str, Any]


def environment(
    placement: Placement, processes: int = 1, *, sharded: bool = False
) -> dict[str, Any]:
    """Everything, apart from the settings, that affects the bits of a training step."""
    return {
        "trainer": REVISION,
        "torch": str(torch.__version__),  # a plain string, as weights_only requires
        "device": describe(placement.device),
        "dtype": placement.dtype_name,
        "threads": placement.threads,
        "processes": processes,
        "sharded": sharded,
    }


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """What differs between two environments, such as "threads 2, was 4"; "" if nothing does."""
    return ", ".join(
        f"{name} {value}, was {before.get(name)}"
        for name, value in now.items()
        if before.get(name) != value
    )


def save_state(
    path: Path,
    *,
    gpt: GPT,
    optimizers: Optimizers,
    average: Average,
    counters: Counters,
    environment: Mapping[str, Any],
    reports: Mapping[str, Any],
    ranks: Ranks = ALONE,
) -> None:
    """Replace the state file atomically. Every process must call this, because each may have a part
    of the model; the main process writes. Raises OSError if the file cannot be written."""
    document = {
        "version": VERSION,
        "counters": asdict(counters),
        "environment": dict(environment),
        "weights": gather_weights(gpt, ranks),
        "average": average.state_dict(),
        "optimizers": optimizers.state_dict(),
        "reports": dict(reports),
    }
    if ranks.is_main:
        path.parent.mkdir(exist_ok=True)  # fails if the run was removed meanwhile
        with whole_file(path) as file:
            try:
                torch.save(document, file)
            except RuntimeError as error:
                # torch's writer raises its own error; the file's error is its context.
                cause = error.__context__
                raise (cause if isinstance(cause, OSError) else OSError(str(error))) from error


def load_state(
    path: Path, *, gpt: GPT, optimizers: Optimizers, average: Average
) -> tuple[Counters, dict[str, Any], dict[str, Any]]:
    """Restore weights, average and optimizers. Returns the counters, the `environment` of the saved
    run, and the states of its step log and divergence monitor. Raises TrainingError."""
    document = read_state(path, mapped=is_sharded(gpt))
    try:
        scatter_weights(gpt, document.weights)
        average.load_state_dict(document.average)
        optimizers.load_state_dict(document.optimizers)
    except DAMAGE as error:
        raise TrainingError(f"{path} does not fit the run's model: {error}") from error
    return document.counters, document.environment, document.reports


def read_state(path: Path, *, mapped: bool = False) -> SavedState:
    """The contents of the state file. If `mapped`, tensors stay on the disk until they are used.
    Raises TrainingError."""
    try:
        require_regular(path)
        with zipfile.ZipFile(path) as archive:  # torch does not compare the checksums
            if damaged := archive.testzip():
                raise TrainingError(f"{path} is damaged: the checksum of {damaged} is wrong")
        document = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise TrainingError(f"there is nothing to resume: {path} does not exist") from error
    except (OSError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, *DAMAGE) as error:
        raise TrainingError(f"{path} is not a complete training state: {error}") from error
    version = document.get("version") if isinstance(document, dict) else None
    if type(version) is not int or version != VERSION:
        raise TrainingError(
            f"{path} has version {version!r}, but this version of logitd reads only version "
            f"{VERSION}"
        )
    try:
        return SavedState.model_validate(document)
    except ValidationError as error:
        raise TrainingError(f"{path} is damaged: {first_error(error)}") from error
