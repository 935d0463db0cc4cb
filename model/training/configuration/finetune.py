"""Fine-tuning: the shape and the recipe of a run that begins with the weights of a checkpoint.

Shape and vocabulary are the checkpoint's; a contradiction is rejected with both values. Three
fields may change, because no weight depends on them: dropout, the context length unless positions
are learned, and the scaling of rotary positions, with which a longer context is learned.

The recipe is the preset's and the user's, except for

  *_lr      a tenth of the preset's: the weights are good already, and large steps would undo that
  warmup    a twentieth of the steps: the optimizers begin without momentum
  --lora    AdamW for the adapters, at LORA_RATE and without weight decay: Muon's steps are as large
            for a matrix that is zero as for any other

Pure functions. `model/training/setup/base.py` opens the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.training.configuration.config import SHAPE_FIELDS, TrainingError
from logitd.model.training.configuration.presets import Recipe
from logitd.model.transformer.config import TARGETS, ConfigError, GPTConfig
from logitd.model.transformer.lora import LoraError, LoraShape, check_rank

SLOWER = 10
"""Divisor of the preset's learning rates."""
WARMUP = 0.05
"""Share of a run's steps."""
LORA_RATE = 1e-3

RATES = ("matrix_lr", "embedding_lr", "head_lr", "scalar_lr")
CHANGEABLE = frozenset({"dropout", "context_length", "rope_scaling"})
"""Fields of the shape that no weight depends on; the context length only if positions are
computed."""


@dataclass(frozen=True)
class Base:
    """The checkpoint that a fine-tuned run begins with.

    record         its description in checkpoints and cards of the run
    chat_template  template of the run's checkpoints unless another is given
    checkpoint     None if its weights are not needed: the saved state of a resumed run has them all
    """

    record: Mapping[str, Any]
    chat_template: str | None
    checkpoint: CheckpointInfo | None = None

    @property
    def opened(self) -> CheckpointInfo:
        assert self.checkpoint is not None, "a new run has opened its base"
        return self.checkpoint

    def to_dict(self) -> dict[str, Any]:
        """The part that run.json keeps."""
        return {"record": dict(self.record), "chat_template": self.chat_template}


def lora_shape(given: Mapping[str, Any]) -> LoraShape | None:
    """The adapters to train. Raises TrainingError for their flags without --from or --lora."""
    flags = sorted({"lora", "lora_alpha", "lora_targets"} & given.keys())
    if not flags:
        return None
    if "from_checkpoint" not in given:
        raise TrainingError(f"{', '.join(flags)} needs a checkpoint to adapt: name one with --from")
    if "lora" not in given:
        raise TrainingError(f"{', '.join(flags)} goes with --lora RANK")
    try:
        rank = given["lora"]
        return LoraShape(rank, given.get("lora_alpha", rank), given.get("lora_targets", TARGETS))
    except LoraError as error:
        raise TrainingError(str(error)) from error


def finetuned_recipe(
    given: Mapping[str, Any], recipe: Recipe, base: GPTConfig, lora: LoraShape | None
) -> Recipe:
    """The recipe of a fine-tuned run, from the preset's with the `given` values. Raises
    TrainingError for a given field that contradicts the checkpoint or would change nothing."""
    for name in ("tokenizer", "init"):
        if name in given:
            raise TrainingError(
                f"{name} is {given[name]!r}, but the vocabulary and the initial weights are the "
                f"checkpoint's: remove {name}"
            )
    values: dict[str, Any] = {name: getattr(recipe, name) / SLOWER for name in RATES}
    values["warmup"] = round(WARMUP * recipe.steps)
    if lora is not None:
        if given.get("optimizer", "adamw") != "adamw":
            raise TrainingError(
                f"optimizer is {given['optimizer']}, but adapters are trained by adamw: one of "
                "their two matrices begins as zero"
            )
        if frozen := sorted(set(given) & set(RATES) - {"matrix_lr"}):
            raise TrainingError(
                f"{', '.join(frozen)} goes without --lora, which trains only adapters of block "
                "matrices; their learning rate is matrix_lr"
            )
        values |= {"optimizer": "adamw", "matrix_lr": LORA_RATE, "weight_decay": 0.0}
    values = {name: value for name, value in values.items() if name not in given}
    return replace(recipe, **values, tokenizer="the checkpoint's", vocab_size=base.vocab_size)


def finetuned_model(given: Mapping[str, Any], base: GPTConfig, lora: LoraShape | None) -> GPTConfig:
    """The checkpoint's model with the `given` context, scaling and dropout. Raises TrainingError
    for a given field that contradicts the checkpoint."""
    for name in sorted(given.keys() & {"vocab_size", *SHAPE_FIELDS} - CHANGEABLE):
        if given[name] != getattr(base, name):
            raise TrainingError(
                f"{name} is {given[name]}, but the checkpoint has {getattr(base, name)}: remove it"
            )
    context = given.get("context_length", base.context_length)
    if base.positions == "learned" and context != base.context_length:
        raise TrainingError(
            f"context_length is {context}, but the checkpoint has {base.context_length} learned "
            "positions; the context can change only with rotary or sinusoidal positions"
        )
    scaling = given.get("rope_scaling", base.rope_scaling)
    if lora is not None and scaling != base.rope_scaling:
        raise TrainingError(
            f"rope_scaling is {scaling}, but the checkpoint has {base.rope_scaling}, which `logitd "
            "merge` keeps, because an adapter has no positions: remove --lora"
        )
    try:
        dropout = given.get("dropout", base.dropout)
        model = replace(base, context_length=context, dropout=dropout, rope_scaling=scaling)
        if lora is not None:
            check_rank(model, lora)
    except (ConfigError, LoraError) as error:
        raise TrainingError(str(error)) from error
    return model
