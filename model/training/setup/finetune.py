"""Fine-tuning: a run that begins with the weights of a checkpoint instead of random ones.

Shape and vocabulary are the checkpoint's; what contradicts them is rejected with both values.
Three things may change, because no weight depends on them: dropout, the context length where
positions are rotary or sinusoidal (learned positions are weights), and the scaling of rotary
positions, with which a longer context is learned.

The recipe is the preset's, except for what is given on the command line and

  *_lr      a tenth of the preset's: the weights are good already, and large steps would undo that
  warmup    a twentieth of the steps: the optimizers begin without momentum
  --lora    AdamW for the adapters, at LORA_RATE and without weight decay: Muon's steps are as large
            for a matrix that is zero as for any other

Does not train, and does not write adapters (`model/checkpoint/adapter.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from logitd.model.checkpoint.checkpoint import (
    CheckpointError,
    CheckpointInfo,
    load_weights,
    read_checkpoint,
)
from logitd.model.checkpoint.run_folder import is_run
from logitd.model.training.configuration.config import SHAPE_FIELDS, TrainingError
from logitd.model.training.configuration.presets import Recipe
from logitd.model.training.events import EventHandler, Noticed
from logitd.model.training.optim.optimizers import initialise
from logitd.model.transformer.config import TARGETS, ConfigError, GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.lora import LoraError, LoraShape, adapt, check_rank, trained_weights

SLOWER = 10
"""Times slower than from scratch."""
WARMUP = 0.05
"""Of a run's steps."""
LORA_RATE = 1e-3

RATES = ("matrix_lr", "embedding_lr", "head_lr", "scalar_lr")
CHANGEABLE = frozenset({"dropout", "context_length", "rope_scaling"})
"""Parts of the shape that no weight depends on, the context if positions are not learned."""


@dataclass(frozen=True)
class Base:
    """Where a fine-tuned run begins.

    record         what its checkpoints and cards say of that
    chat_template  what they carry if no other is given
    checkpoint     the checkpoint, where its weights are needed: not when a run is resumed whose
                   saved state holds them all
    """

    record: Mapping[str, Any]
    chat_template: str | None
    checkpoint: CheckpointInfo | None

    @property
    def opened(self) -> CheckpointInfo:
        assert self.checkpoint is not None, "a run that begins has its checkpoint"
        return self.checkpoint

    def to_dict(self) -> dict[str, Any]:
        """What run.json keeps."""
        return {"record": dict(self.record), "chat_template": self.chat_template}


def open_base(path: Path) -> Base:
    """The checkpoint at `path`, as the base of a new run."""
    info = _read(path)
    if not info.tokenizer.has_text:
        raise TrainingError(
            f"--from: {path} has no vocabulary, so no text becomes its token ids; import the model "
            "once more and name its vocabulary with --tokenizer"
        )
    training = info.training
    resolved = info.path.resolve()  # `best` is a link into the run
    record = {
        "name": f"{info.name}/{resolved.name}" if is_run(resolved.parent) else info.name,
        "weights_sha256": info.weights_sha256,
        "step": training.step,
        "tokens": training.tokens,
        "data": dict(training.data),
        **({} if training.base is None else {"base": dict(training.base)}),
    }
    return Base(record, info.chat_template.source if info.chat_template else None, info)


def reopen_base(saved: Mapping[str, Any], path: Path | None) -> Base:
    """The base of a run that exists, from what run.json `saved` of it. `path` is where its
    checkpoint is now, or None where its weights are not needed; it has to be the same one."""
    record = saved["record"]
    info = None if path is None else _read(path)
    if info is not None and info.weights_sha256 != record["weights_sha256"]:
        raise TrainingError(
            f"the run adapts {record['name']} with weights {record['weights_sha256'][:12]}..., "
            f"and {path} has {info.weights_sha256[:12]}...: name with --from where the former is "
            "now"
        )
    return Base(record, saved["chat_template"], info)


def initial_model(
    config: GPTConfig,
    recipe: Recipe,
    base: Base | None,
    lora: LoraShape | None,
    report: EventHandler,
) -> GPT:
    """The model of a run before its first step, in float32: of random weights, or of the base's,
    with adapters where these are asked for."""
    gpt = GPT(config)
    generator = torch.Generator().manual_seed(recipe.seed)
    if base is None:
        initialise(gpt, recipe, generator)
        return gpt
    if base.checkpoint is not None:
        try:
            source = load_weights(base.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
        except CheckpointError as error:
            raise TrainingError(str(error)) from error
        gpt.load_state_dict(source.state_dict())
    if lora is not None:
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
        return read_checkpoint(path)
    except CheckpointError as error:
        raise TrainingError(f"--from: {error}") from error


def resolve_lora(given: Mapping[str, Any]) -> LoraShape | None:
    """The adapters that are asked for."""
    if asked := sorted({"lora", "lora_alpha", "lora_targets"} & given.keys()):
        if "from_checkpoint" not in given:
            raise TrainingError(
                f"{', '.join(asked)} was given, but no checkpoint to adapt: name one with --from"
            )
        if "lora" not in given:
            raise TrainingError(f"{', '.join(asked)} goes with --lora RANK")
        try:
            rank = given["lora"]
            return LoraShape(
                rank, given.get("lora_alpha", rank), given.get("lora_targets", TARGETS)
            )
        except LoraError as error:
            raise TrainingError(str(error)) from error
    return None


def resolve_finetune(
    given: Mapping[str, Any], recipe: Recipe, base: GPTConfig, lora: LoraShape | None
) -> tuple[Recipe, GPTConfig]:
    """The recipe and the model of a fine-tuned run; `recipe` is the preset's with what was given.

    Raises TrainingError for what contradicts the checkpoint, or would change nothing.
    """
    _reject_other_vocabulary(given, base)
    model = _resolve_model(given, base, lora)
    return _gentle(given, recipe, base.vocab_size, lora), model


def _resolve_model(given: Mapping[str, Any], base: GPTConfig, lora: LoraShape | None) -> GPTConfig:
    """The checkpoint's model, with another context, scaling and dropout where they are asked
    for."""
    for name in sorted(given.keys() & set(SHAPE_FIELDS) - CHANGEABLE):
        if given[name] != getattr(base, name):
            raise TrainingError(
                f"{name} {given[name]} was given, but the checkpoint has {getattr(base, name)}: "
                "its weights have one shape"
            )
    context = given.get("context_length", base.context_length)
    if base.positions == "learned" and context != base.context_length:
        raise TrainingError(
            f"context_length {context} was given, but the checkpoint has {base.context_length} "
            "learned positions; only with rotary or sinusoidal ones can the context be another"
        )
    scaling = given.get("rope_scaling", base.rope_scaling)
    if lora is not None and scaling != base.rope_scaling:
        raise TrainingError(
            f"rope_scaling {scaling} was given beside --lora, but the checkpoint has "
            f"{base.rope_scaling}: an adapter says nothing of positions, and `logitd merge` would "
            "keep the checkpoint's; train without --lora"
        )
    try:
        model = replace(
            base,
            context_length=context,
            dropout=given.get("dropout", base.dropout),
            rope_scaling=scaling,
        )
        if lora is not None:
            check_rank(model, lora)
    except (ConfigError, LoraError) as error:
        raise TrainingError(str(error)) from error
    return model


def _gentle(
    given: Mapping[str, Any], recipe: Recipe, vocab_size: int, lora: LoraShape | None
) -> Recipe:
    """The preset's recipe for weights that are good already."""
    values: dict[str, Any] = {name: getattr(recipe, name) / SLOWER for name in RATES}
    values["warmup"] = round(WARMUP * recipe.steps)
    if lora is not None:
        _reject_what_adapters_lack(given)
        values |= {"optimizer": "adamw", "matrix_lr": LORA_RATE, "weight_decay": 0.0}
    values = {name: value for name, value in values.items() if name not in given}
    return replace(recipe, tokenizer="the checkpoint's", vocab_size=vocab_size, **values)


def _reject_other_vocabulary(given: Mapping[str, Any], base: GPTConfig) -> None:
    if given.get("vocab_size", base.vocab_size) != base.vocab_size:
        raise TrainingError(
            f"vocab_size {given['vocab_size']} was given, but the checkpoint has "
            f"{base.vocab_size}: the vocabulary comes with the checkpoint"
        )
    for name, reason in (
        ("tokenizer", "the vocabulary comes with the checkpoint"),
        ("init", "the initial weights are the checkpoint's"),
    ):
        if name in given:
            raise TrainingError(f"{name} {given[name]!r} was given beside --from: {reason}")


def _reject_what_adapters_lack(given: Mapping[str, Any]) -> None:
    if given.get("optimizer", "adamw") != "adamw":
        raise TrainingError(
            f"optimizer {given['optimizer']} was given, but adapters are trained by adamw: one of "
            "their two matrices begins as zero"
        )
    if frozen := sorted(set(given) & set(RATES) - {"matrix_lr"}):
        raise TrainingError(
            f"{', '.join(frozen)} was given, but with --lora only adapters of block matrices are "
            "trained; their learning rate is matrix_lr"
        )
