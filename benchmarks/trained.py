"""Runs for the benchmarks of training recipes: each trained in a process of its own, then measured
on its whole validation text (`train.py`, `train_small.py`).
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from logitd.model.checkpoint.checkpoint import load_checkpoint
from logitd.model.data.prepare import read_prepared
from logitd.model.data.windows import validation_windows
from logitd.model.device import Placement, keep_freed_memory
from logitd.model.training.configuration.autosize import Measured
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.setup.measure import measure_machine
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.training.step.validate import validate
from logitd.model.training.trainer import TrainingResult, train
from logitd.model.transformer.gpt import GPT

FIRST_SEED = 1337
WINDOWS_AT_ONCE = 8


def in_a_process(module: str, values: Any) -> Any:
    """Run `python -m module --one VALUES` and return the JSON that it prints last."""
    command = [sys.executable, "-m", module, "--one", json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{values} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows with the same keys."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    lines += ["| " + " | ".join(map(_cell, row.values())) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    match value:
        case float():
            return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(map(_cell, value))
        case _:
            return str(value)


def train_here(config: TrainingConfig) -> tuple[TrainingResult, Placement]:
    """Train as `logitd train` does. Leaves torch's threads as the run has them."""
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    keep_freed_memory()
    result, placement = train(config), _placement(config)
    torch.set_num_threads(placement.threads)
    return result, placement


def measured_here(config: TrainingConfig) -> Measured:
    """The size for all minutes of a configuration on this machine, for a long text."""
    return measure_machine(config, _placement(config), 60 * (config.minutes or 0.0))


def _placement(config: TrainingConfig) -> Placement:
    return training_placement(config.device, config.dtype or "auto", config.threads)


def weights_of(checkpoint: Path, placement: Placement) -> GPT:
    """The model that a run wrote, in float32."""
    _, gpt = load_checkpoint(checkpoint, device=placement.device, dtype=torch.float32)
    return gpt


def held_out_bits_per_byte(gpt: GPT, run: Path, placement: Placement) -> float:
    """Bits per byte of the run's whole validation text, in windows as long as the context."""
    prepared = read_prepared(run / "data")
    windows = validation_windows(
        prepared.val,
        prepared.tokenizer,
        window=gpt.config.context_length,
        batch_size=WINDOWS_AT_ONCE,
        batches=None,
    )
    return validate(gpt, windows, Forward(gpt, placement, dropout=0.0)).bits_per_byte
