"""State: everything that a run needs to go on exactly where it stopped.

One file, `state/state.pt`: float32 weights, the states of all optimizers, the random state, the
step and its counters. The data position is not in it: batches are a function of the step. Written
aside, synced and renamed; read with `weights_only=True`, so reading never executes code. Does not
cover checkpoints (`model/checkpoint.py`): those are for serving.

Bit for bit is promised where the recorded environment is the same (torch, instruction set,
threads, device, dtype); `differences` says where it is not.
"""

import os
import pickle
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from model.device import Placement, describe
from model.gpt import GPT
from model.training.config import TrainingError
from model.training.recipe import Optimizers

VERSION = 1


@dataclass(frozen=True)
class Environment:
    """What the bits of a training step depend on besides the run itself."""

    torch: str
    device: str
    dtype: str
    threads: int

    @classmethod
    def of(cls, placement: Placement) -> "Environment":
        return cls(
            torch=str(torch.__version__),  # a plain string: weights_only reads no other
            device=describe(placement.device),
            dtype=placement.dtype_name,
            threads=placement.threads,
        )

    def differences(self, other: "Environment") -> str:
        """For a person: "threads 2, was 4"; "" when the two agree."""
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(
            f"{name} {mine[name]}, was {theirs[name]}"
            for name in mine
            if mine[name] != theirs[name]
        )


@dataclass(frozen=True)
class Counters:
    """How far a run is."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def save_state(
    path: Path,
    *,
    gpt: GPT,
    optimizers: Optimizers,
    counters: Counters,
    environment: Environment,
) -> None:
    """Replace the state file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "version": VERSION,
        "counters": asdict(counters),
        "environment": asdict(environment),
        "weights": gpt.state_dict(),
        "optimizers": optimizers.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(document, file)
            file.flush()
            os.fsync(file.fileno())
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def load_state(path: Path, *, gpt: GPT, optimizers: Optimizers) -> tuple[Counters, Environment]:
    """Restore weights, optimizers and the random state; returns the rest."""
    document = read_state(path)
    try:
        gpt.load_state_dict(document["weights"])
        optimizers.load_state_dict(document["optimizers"])
        torch.set_rng_state(document["rng"])
        if torch.cuda.is_available() and document["cuda_rng"]:
            torch.cuda.set_rng_state_all(document["cuda_rng"])
        return Counters(**document["counters"]), Environment(**document["environment"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{path} does not fit the run's model: {error}") from error


def read_state(path: Path) -> dict[str, Any]:
    """The file's contents, or a sentence about what is wrong with it."""
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise TrainingError(
            f"there is nothing to resume: {path} does not exist; the run stopped before it first "
            "saved"
        ) from error
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise TrainingError(f"{path} is no whole training state: {error}") from error
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        raise TrainingError(f"{path} has version {version!r}; this logitd reads {VERSION}")
    return dict(document)
