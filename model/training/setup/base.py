"""Base: opens the checkpoint to fine-tune, and builds the initial model of any run.

`model/training/configuration/finetune.py` has the rules of fine-tuning;
`model/checkpoint/adapter.py` writes adapters.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from logitd.model.checkpoint.adapter import changed_field
from logitd.model.checkpoint.checkpoint import CheckpointError, CheckpointInfo, read_checkpoint
from logitd.model.checkpoint.load import load_weights
from logitd.model.checkpoint.run_folder import run_of
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.configuration.finetune import Base
from logitd.model.training.configuration.resolve import ResolvedTraining
from logitd.model.training.events import EventHandler, Noticed
from logitd.model.training.optim.optimizers import initialize
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.lora import adapt, trained_weights


def open_base(path: Path) -> Base:
    """Open the checkpoint at `path` as the base of a new run."""
    info = _read(path)
    if not info.tokenizer.has_text:
        raise TrainingError(
            f"--from: {path} has no vocabulary to tokenize a text with; import the model again "
            "and set --tokenizer to its vocabulary"
        )
    training = info.training
    resolved = info.path.resolve()  # `best` is a link into the run
    record = {
        "name": f"{info.name}/{resolved.name}" if run_of(resolved) else info.name,
        "weights_sha256": info.weights_sha256,
        "model": info.config.to_dict(),
        "step": training.step,
        "tokens": training.tokens,
        "data": dict(training.data),
        **({} if training.base is None else {"base": dict(training.base)}),
    }
    return Base(record, info.chat_template.source if info.chat_template else None, info)


def reopen_base(base: Base, path: Path) -> Base:
    """Open the base of an existing run at its current `path`. Raises TrainingError if it is a
    different checkpoint."""
    info, record = _read(path), base.record
    if info.weights_sha256 != record["weights_sha256"]:
        raise TrainingError(
            f"--from: the run began with {record['name']}, weights "
            f"{record['weights_sha256'][:12]}..., but {path} has {info.weights_sha256[:12]}...: "
            f"set --from to the current path of {record['name']}, or leave it out"
        )
    if changed := changed_field(record, info.config):
        raise TrainingError(
            f"--from: {path} has the weights that the run began with, but {changed}: set --from to "
            f"the current path of {record['name']}, or leave it out"
        )
    return replace(base, checkpoint=info)


def keep_base(base: Base, path: Path) -> Base:
    """Keep the base of adapters in their run, at `path`, and open it there: without the base an
    adapter is worthless, but the base's own run removes old checkpoints. Raises OSError."""
    shutil.copytree(base.opened.path, path, copy_function=_link_or_copy)
    return reopen_base(base, path)


def _link_or_copy(source: str, destination: str) -> None:
    """A hard link takes no space. Files of a checkpoint never change, so both names may share
    one."""
    try:
        os.link(source, destination)
    except OSError:  # another file system, or one without hard links
        shutil.copy(source, destination)


def initial_model(training: ResolvedTraining, report: EventHandler) -> GPT:
    """Build the model of a run before its first step, in float32: with random weights or the base's
    weights, and with the adapters to train."""
    gpt = GPT(training.model)
    generator = torch.Generator().manual_seed(training.recipe.seed)
    if (base := training.base) is None:
        initialize(gpt, training.recipe, generator)
        return gpt
    if base.checkpoint is not None:
        try:
            source = load_weights(base.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
        except CheckpointError as error:
            raise TrainingError(str(error)) from error
        gpt.load_state_dict(source.state_dict())
    if (lora := training.lora) is not None:
        adapt(gpt, lora, generator)
        trained = sum(tensor.numel() for tensor in trained_weights(gpt).values())
        report(
            Noticed(
                f"adapters of rank {lora.rank}: {trained:,} of {gpt.parameter_count():,} "
                "parameters are trained"
            )
        )
    return gpt


def _read(path: Path) -> CheckpointInfo:
    try:
        info = read_checkpoint(path)
        _shape = info.config  # a model computed by its owner's code has none
    except CheckpointError as error:
        raise TrainingError(f"--from: {error}") from error
    return info
