"""State: the saved state of a run, for an exact resume.

One file, `state/state.pt`: float32 weights (only those of adapters, with adapters), the states of
all optimizers, the counters, and the state of the step log and the divergence monitor. Neither a
position in the data nor a random state is in it: batches and the noise of dropout are functions of
the seed and the step (`model/data/batches.py`). It is written under another name, synced and
renamed, and read with `weights_only=True`, so reading never executes code.

A resumed run has the same bits if the recorded environment is the same; `differences` names what
changed. Checkpoints, which are for serving, are in `model/checkpoint/checkpoint.py`.
"""

import pickle
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from logitd.model.device import Placement, describe
from logitd.model.files import require_regular, whole_file
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.distributed.fsdp import gather_weights, is_sharded, scatter_weights
from logitd.model.training.distributed.ranks import ALONE, Ranks
from logitd.model.training.optim.optimizers import Optimizers
from logitd.model.training.stopping.length import Counters
from logitd.model.transformer.gpt import GPT

VERSION = 2


def environment(
    placement: Placement, processes: int = 1, *, sharded: bool = False
) -> dict[str, Any]:
    """Everything outside the run that the bits of a training step depend on."""
    return {
        "torch": str(torch.__version__),  # a plain string: weights_only reads no other
        "device": describe(placement.device),
        "dtype": placement.dtype_name,
        "threads": placement.threads,
        "processes": processes,
        "sharded": sharded,
    }


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Changes of an environment, such as "threads 2, was 4"; "" if there are none."""
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
    counters: Counters,
    environment: Mapping[str, Any],
    reports: Mapping[str, Any],
    ranks: Ranks = ALONE,
) -> None:
    """Replace the state file, atomically. The main process writes; all have to call it, because
    each has a part of a sharded model. Raises OSError if it cannot be written."""
    document = {
        "version": VERSION,
        "counters": asdict(counters),
        "environment": dict(environment),
        "weights": gather_weights(gpt, ranks),
        "optimizers": optimizers.state_dict(),
        "reports": dict(reports),
    }
    if ranks.is_main:
        path.parent.mkdir(exist_ok=True)  # fails if the run was removed meanwhile
        with whole_file(path) as file:
            try:
                torch.save(document, file)
            except RuntimeError as error:
                # torch's writer raises an error of its own with the file's as its context.
                cause = error.__context__
                raise (cause if isinstance(cause, OSError) else OSError(str(error))) from error


def load_state(
    path: Path, *, gpt: GPT, optimizers: Optimizers
) -> tuple[Counters, dict[str, Any], dict[str, Any]]:
    """Restore weights and optimizers. Returns the counters, the `environment` of the saved run, and
    the state of its reports. Raises TrainingError."""
    document = read_state(path, mapped=is_sharded(gpt))
    try:
        scatter_weights(gpt, document["weights"])
        optimizers.load_state_dict(document["optimizers"])
        counters = Counters(**document["counters"])
        return counters, dict(document["environment"]), dict(document["reports"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{path} does not fit the run's model: {error}") from error


def read_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """The file's contents. `mapped` leaves tensors on the disk, for callers that read a counter.
    Raises TrainingError."""
    try:
        require_regular(path)
        document = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise TrainingError(f"there is nothing to resume: {path} does not exist") from error
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise TrainingError(f"{path} is not a complete training state: {error}") from error
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        raise TrainingError(f"{path} has version {version!r}; this logitd reads {VERSION}")
    return dict(document)
