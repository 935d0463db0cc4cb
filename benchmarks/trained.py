"""A run as the benchmarks of training take it: trained in this process, then held against the whole
validation text.

Covers what their runs have in common. What is trained, and what is made of the figures, is theirs
(`train.py`, `train_small.py`).
"""

from pathlib import Path

import torch

from logitd.model.checkpoint.checkpoint import load_checkpoint
from logitd.model.data.prepare import read_prepared
from logitd.model.data.windows import validation_windows
from logitd.model.device import Placement, keep_freed_memory
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.training.step.validate import validate
from logitd.model.training.trainer import TrainingResult, train
from logitd.model.transformer.gpt import GPT

WINDOWS_AT_ONCE = 8


def train_here(config: TrainingConfig) -> tuple[TrainingResult, Placement]:
    """Train as `logitd train` does, and where. Leaves torch's threads as the run has them."""
    keep_freed_memory()
    result = train(config)
    placement = training_placement(config.device, config.dtype or "auto", config.threads)
    torch.set_num_threads(placement.threads)
    return result, placement


def weights_of(checkpoint: Path, placement: Placement) -> GPT:
    """The model that a run wrote, in float32."""
    _, gpt = load_checkpoint(checkpoint, device=placement.device, dtype=torch.float32)
    return gpt


def held_out_bits_per_byte(gpt: GPT, run: Path, placement: Placement) -> float:
    """Of the whole validation text of the run, in windows as long as the model's context."""
    prepared = read_prepared(run / "data")
    windows = validation_windows(
        prepared.val,
        prepared.tokenizer,
        window=gpt.config.context_length,
        batch_size=WINDOWS_AT_ONCE,
        batches=None,
    )
    return validate(gpt, windows, Forward(gpt, placement, dropout=0.0)).bits_per_byte
