"""Runs for the benchmarks of training recipes (`train.py`, `train_small.py`).

    python -m benchmarks.trained FIELDS

trains one run, with the fields of TrainingConfig as JSON, measures it on its whole validation text,
and prints the outcome as JSON. The benchmarks start one such process for each run.
"""

import json
import math
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.data.prepare import read_prepared
from logitd.model.data.windows import validation_windows
from logitd.model.device import Placement, keep_freed_memory
from logitd.model.training.configuration.autosize import Choice
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.resolve import resolve
from logitd.model.training.optim.optimizers import kind_of
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.setup.measure import measure_machine
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.training.step.validate import validate
from logitd.model.training.trainer import train
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT

FIRST_SEED = 1337
WINDOWS_AT_ONCE = 8


@dataclass(frozen=True)
class Outcome:
    """The figures of a run. Losses are in bits per byte; `matrices` counts the parameters of the
    block matrices, and `parameters` counts all parameters."""

    last: float
    best: float
    training: float  # of the last report
    passes: float
    steps: int
    tokens: int
    seconds: float
    matrices: int
    parameters: int
    vocab_size: int
    dropout: float
    threads: int


def outcome_of(config: Mapping[str, Any]) -> Outcome:
    """Train in a separate process, with fields of TrainingConfig as JSON."""
    command = [sys.executable, "-m", "benchmarks.trained", json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{config} failed:\n{done.stderr}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def train_here(config: TrainingConfig) -> Outcome:
    """Train as `logitd train` does, then evaluate on the whole validation text."""
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    keep_freed_memory()
    result, placement = train(config), _placement(config)
    torch.set_num_threads(placement.threads)
    prepared = read_prepared(result.run / "data")
    reports = [each for each in RunDirectory(result.run).metrics() if each["kind"] == "train"]
    tokens_per_byte = prepared.train.count / prepared.train.text_bytes
    last, gpt = _held_out_bits_per_byte(result.checkpoint, result.run, placement)
    best = last
    if result.best.resolve() != result.checkpoint.resolve():
        best, _ = _held_out_bits_per_byte(result.best, result.run, placement)
    return Outcome(
        last=last,
        best=best,
        training=reports[-1]["loss"] * tokens_per_byte / math.log(2),
        passes=result.tokens / prepared.train.count,
        steps=result.step,
        tokens=result.tokens,
        seconds=result.seconds,
        matrices=block_matrices(gpt.config),
        parameters=gpt.parameter_count(),
        vocab_size=prepared.tokenizer.vocab_size,
        dropout=gpt.config.dropout,
        threads=placement.threads,
    )


def block_matrices(config: GPTConfig) -> int:
    """Number of parameters in the tensors that the recipe classifies as matrices."""
    with torch.device("meta"):
        gpt = GPT(config)
    return sum(p.numel() for name, p in gpt.named_parameters() if kind_of(gpt, name) == "matrix")


def measured_here(config: TrainingConfig) -> Choice:
    """The size that this machine can train in the configured minutes, assuming that the text is
    long."""
    return measure_machine(resolve(config), _placement(config), 60 * (config.minutes or 0.0))


def _placement(config: TrainingConfig) -> Placement:
    return training_placement(config.device, config.dtype or "auto", config.threads)


def _held_out_bits_per_byte(checkpoint: Path, run: Path, placement: Placement) -> tuple[float, GPT]:
    """Bits per byte of the run's whole validation text, in windows as long as the context, with the
    model in float32. Returns the model too."""
    _, gpt = load_checkpoint(checkpoint, device=placement.device, dtype=torch.float32)
    prepared = read_prepared(run / "data")
    windows = validation_windows(
        prepared.val,
        prepared.tokenizer,
        window=gpt.config.context_length,
        batch_size=WINDOWS_AT_ONCE,
        batches=None,
    )
    return validate(gpt, windows, Forward(gpt, placement, dropout=0.0)).bits_per_byte, gpt


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


if __name__ == "__main__":
    print(json.dumps(asdict(train_here(TrainingConfig(**json.loads(sys.argv[1]))))))
