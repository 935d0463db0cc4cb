"""Fine-tuning: the shape and the recipe of a run that begins with the weights of a checkpoint.

The checkpoint determines shape and vocabulary; a setting that contradicts them is refused. Three
fields may change, because no weight depends on them: dropout, the context length (unless positions
are learned), and the scaling of rotary positions, which a longer context may need. An adapter has
no shape of its own, so the context may then only be shorter, and the scaling cannot change.

The recipe is the preset's, overridden by the user's settings. These values differ from the
preset's unless the user sets them:

  *_lr      a tenth of the preset's, because large steps would undo what the weights have learned
  warmup    a twentieth of the run, because the optimizers begin without momentum. If only the
            clock ends the run, its number of steps is unknown, so the warmup is a `Rewarming`
  windows   not short at first, because the weights have learned from long ones
  --lora    AdamW at LORA_RATE without weight decay, because one matrix of an adapter begins with
            zeros, and Muon's steps for it would be as large as for any other matrix

`model/training/setup/base.py` opens the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.training.configuration.command_line import shown
from logitd.model.training.configuration.config import SHAPE_FIELDS, TrainingError
from logitd.model.training.configuration.presets import Recipe
from logitd.model.transformer.config import TARGETS, ConfigError, GPTConfig
from logitd.model.transformer.lora import LoraError, LoraShape, check_rank

SLOWER = 10
"""Divisor of the preset's learning rates when fine-tuning."""
WARMUP = 0.05
"""Length of the warmup as a share of the run."""
LORA_RATE = 1e-3

RATES = ("matrix_lr", "embedding_lr", "head_lr", "scalar_lr")
CHANGEABLE = frozenset({"dropout", "context_length", "rope_scaling"})
"""Fields of the shape that may change because no weight depends on them; `context_length` only if
positions are not learned."""


@dataclass(frozen=True)
class Base:
    """The checkpoint that a fine-tuned run begins with.

    record         description of the base in the run's checkpoints and cards
    chat_template  chat template of the run's checkpoints unless the user sets another
    checkpoint     the opened checkpoint; None in a resumed run whose state has all weights
    """

    record: Mapping[str, Any]
    chat_template: str | None
    checkpoint: CheckpointInfo | None = None

    @property
    def opened(self) -> CheckpointInfo:
        assert self.checkpoint is not None, "a new run has opened its base"
        return self.checkpoint

    def to_dict(self) -> dict[str, Any]:
        """The part that run.json stores."""
        return {"record": dict(self.record), "chat_template": self.chat_template}


def lora_shape(given: Mapping[str, Any]) -> LoraShape | None:
    """The shape of the adapters to train; None without adapters. Raises TrainingError if a flag for
    adapters is set without --from or --lora."""
    flags = sorted({"lora", "lora_alpha", "lora_targets"} & given.keys())
    if not flags:
        return None
    if "from_checkpoint" not in given:
        raise TrainingError(f"{', '.join(flags)} needs a checkpoint to adapt: name one with --from")
    if "lora" not in given:
        raise TrainingError(f"{', '.join(flags)} has no effect without --lora: set --lora RANK")
    try:
        rank = given["lora"]
        return LoraShape(rank, given.get("lora_alpha", rank), given.get("lora_targets", TARGETS))
    except LoraError as error:
        raise TrainingError(str(error)) from error


def finetuned_recipe(
    given: Mapping[str, Any], recipe: Recipe, lora: LoraShape | None, *, by_clock: bool
) -> Recipe:
    """The recipe of a fine-tuned run. `recipe` is the preset's with the `given` values; `by_clock`
    is True if no number of steps limits the run. Raises TrainingError for a given field that
    contradicts the checkpoint or would have no effect."""
    for name in ("tokenizer", "init"):
        if name in given:
            raise TrainingError(
                f"{name} is {given[name]!r}, but the vocabulary and the initial weights are the "
                f"checkpoint's: remove {name}"
            )
    values: dict[str, Any] = {name: getattr(recipe, name) / SLOWER for name in RATES}
    values["warmup"] = 0 if by_clock else round(WARMUP * recipe.steps)
    values["short_windows"] = 0.0
    if lora is not None:
        if given.get("optimizer", "adamw") != "adamw":
            raise TrainingError(
                f"optimizer is {given['optimizer']}, but adapters need adamw, because one of their "
                "two matrices begins with zeros: remove optimizer"
            )
        if frozen := sorted(set(given) & set(RATES) - {"matrix_lr"}):
            raise TrainingError(
                f"{', '.join(frozen)} has no effect with --lora, which trains only adapters of "
                "block matrices: set matrix_lr instead"
            )
        values |= {"optimizer": "adamw", "matrix_lr": LORA_RATE, "weight_decay": 0.0}
    values = {name: value for name, value in values.items() if name not in given}
    return replace(recipe, **values, tokenizer="the checkpoint's")


def finetuned_model(given: Mapping[str, Any], base: GPTConfig, lora: LoraShape | None) -> GPTConfig:
    """The checkpoint's shape with the `given` context, scaling and dropout. Raises TrainingError
    for a given field that contradicts the checkpoint."""
    for name in sorted(given.keys() & {"vocab_size", *SHAPE_FIELDS} - CHANGEABLE):
        if given[name] != getattr(base, name):
            raise TrainingError(
                f"{name} is {shown(given[name])}, but the checkpoint has "
                f"{shown(getattr(base, name))}: remove {name}"
            )
    context = given.get("context_length", base.context_length)
    if base.positions == "learned" and context != base.context_length:
        raise TrainingError(
            f"context_length is {context}, but the checkpoint has {base.context_length} learned "
            "positions; the context can change only with rotary or sinusoidal positions"
        )
    if lora is not None and context > base.context_length:
        raise TrainingError(
            f"context_length is {context}, but the checkpoint has {base.context_length}, which an "
            f"adapter cannot increase: set at most {base.context_length}, or remove --lora"
        )
    scaling = given.get("rope_scaling", base.rope_scaling)
    if lora is not None and scaling != base.rope_scaling:
        raise TrainingError(
            f"rope_scaling is {scaling}, but the checkpoint has {base.rope_scaling}, which an "
            "adapter cannot change: remove rope_scaling or --lora"
        )
    try:
        dropout = given.get("dropout", base.dropout)
        model = replace(base, context_length=context, dropout=dropout, rope_scaling=scaling)
        if lora is not None:
            check_rank(model, lora)
    except (ConfigError, LoraError) as error:
        raise TrainingError(str(error)) from error
    return model
