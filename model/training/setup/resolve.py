"""Resolve: from what a person asked for to what a run does, decided once.

Each value is frozen and made from the one before it:

  TrainingConfig   what was asked for; most fields are None (`config.py`)
  Resolution       the recipe, the model's shape and the adapters that it comes to, with the
                   preset's or the checkpoint's values; for a new run (`resolve_config`)
  RunDescription   the same as run.json keeps it. A resumed run takes it from there, with the few
                   fields that may change (`resolve_resumed`)
  ResolvedRun      the description, and what it comes to in this process: its text, directory,
                   device, batches, whether to compile and to shard (`resolve_run`)

Everything below the trainer reads the ResolvedRun and never the configuration. Opens no file and
writes none: `model/training/setup/begin.py` does.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from logitd.model.data.batches import RankBatch, rank_batch
from logitd.model.data.prepare import PreparedText
from logitd.model.device import Placement
from logitd.model.training.configuration.config import (
    RECIPE_FIELDS,
    RESUMABLE,
    SHAPE_FIELDS,
    TrainingConfig,
    TrainingError,
    command,
    run_name,
)
from logitd.model.training.configuration.exportable import exportable_changes, require_exportable
from logitd.model.training.configuration.presets import Compile, Recipe, preset
from logitd.model.training.distributed.fsdp import worth_sharding
from logitd.model.training.distributed.ranks import Ranks
from logitd.model.training.run.description import RunDescription
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.setup.finetune import Base, resolve_finetune, resolve_lora
from logitd.model.training.step.compile import compiles, worth_compiling
from logitd.model.training.step.forward import training_placement
from logitd.model.training.stopping.length import Length, resolve_length
from logitd.model.transformer.config import GPTConfig, gpt2_shape
from logitd.model.transformer.lora import LoraShape


@dataclass(frozen=True)
class Resolution:
    """What the configuration of a new run comes to before its text is read.

    shape        arguments of `gpt2_shape`: the model without the size of its vocabulary
    base_model   the model of a fine-tuned run, which has its checkpoint's vocabulary
    """

    recipe: Recipe
    shape: Mapping[str, Any]
    base_model: GPTConfig | None = None

    def model(self, vocab_size: int) -> GPTConfig:
        if self.base_model is not None:
            return self.base_model
        return gpt2_shape(vocab_size=vocab_size, **self.shape)


@dataclass(frozen=True)
class Process:
    """What this process computes, and where."""

    ranks: Ranks
    placement: Placement
    rank_batch: RankBatch


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run with everything decided: what trains, evaluates and saves reads this alone.

    name, command   what the checkpoints' cards call it, and the command line that makes it again
    base            the checkpoint that it began with; base_path is where that is
    lora            the adapters that it trains, if it does not train the whole model
    compiled        whether the loss goes through `torch.compile`
    sharded         whether each process has a part of the model instead of a copy
    """

    name: str
    command: str
    recipe: Recipe
    model: GPTConfig
    base: Base | None
    base_path: Path | None
    lora: LoraShape | None
    chat_template: str | None
    text: PreparedText
    directory: RunDirectory
    ranks: Ranks
    placement: Placement
    rank_batch: RankBatch
    length: Length
    log_every: int
    prompts: tuple[str, ...]
    sample_tokens: int
    tensorboard: bool
    compiled: bool
    sharded: bool


def resolve_config(config: TrainingConfig, base: Base | None = None) -> Resolution:
    """What a new run comes to: the preset's values, the checkpoint's where it begins with one, and
    over them what was given. Raises PresetError, ConfigError and TrainingError."""
    given = config.given()
    start = preset(config.preset)
    recipe = replace(start.recipe, **_only(given, RECIPE_FIELDS))
    if recipe.tokenizer != "own" and "vocab_size" in given:
        raise TrainingError(
            f"vocab_size {config.vocab_size} was given, but the tokenizer {recipe.tokenizer!r} "
            "brings its own; vocab_size goes with the tokenizer 'own'"
        )
    lora = resolve_lora(given)
    if base is not None:
        recipe, model = resolve_finetune(given, recipe, base.opened.config, lora)
        if config.exportable:
            require_exportable(model)
        return Resolution(recipe, {}, model)
    shape = {**start.shape, **_only(given, SHAPE_FIELDS)}
    if config.exportable:
        shape |= exportable_changes(gpt2_shape(vocab_size=recipe.vocab_size, **shape), given)
    resolution = Resolution(recipe, shape)
    resolution.model(recipe.vocab_size)  # rejects what is wrong whatever the vocabulary
    return resolution


def resolve_resumed(config: TrainingConfig, before: RunDescription) -> RunDescription:
    """A run that exists, with what may be given anew. Raises TrainingError for anything else that
    was given and differs."""
    given = config.given()
    values = {name: field.default for name, field in TrainingConfig.model_fields.items()}
    values |= {**before.model.to_dict(), "rope_scaling": before.model.rope_scaling}
    values |= {**asdict(before.recipe), **before.config.given()}
    for name in sorted(given.keys() - RESUMABLE):
        if given[name] != values[name]:
            raise TrainingError(
                f"{name} cannot change when a run is resumed: it is {given[name]!r} now and was "
                f"{values[name]!r}"
            )
    return replace(
        before,
        config=TrainingConfig(**{**before.config.to_dict(), **config.to_dict()}),
        recipe=replace(before.recipe, **_only(given, RECIPE_FIELDS)),
    )


def resolve_compile(config: TrainingConfig, recipe: Recipe, model: GPTConfig) -> Compile:
    """What run.json keeps of `compile`. In a short run `auto` stays, so that one that began on a
    CPU and is resumed on CUDA is compiled there."""
    if config.compile == "auto" and worth_compiling(recipe, model, resolve_length(config, recipe)):
        return "on"
    return config.compile


def resolve_process(config: TrainingConfig, recipe: Recipe, ranks: Ranks) -> Process:
    """Raises DeviceError, and DataError where the processes cannot share a step evenly."""
    placement = training_placement(
        str(ranks.device(config.device)), recipe.dtype, ranks.threads(config.threads)
    )
    own = rank_batch(recipe.batch_size, recipe.accumulate, rank=ranks.rank, size=ranks.size)
    return Process(ranks, placement, own)


def resolve_run(
    description: RunDescription,
    process: Process,
    *,
    directory: RunDirectory,
    text: PreparedText,
    base: Base | None,
    chat_template: str | None,
) -> ResolvedRun:
    """Of one process. Whether it is `sharded` is what this process alone would decide:
    `agree_on_sharding` asks all of them."""
    config, recipe, model = description.config, description.recipe, description.model
    lora = resolve_lora(config.given())
    return ResolvedRun(
        name=run_name(config),
        command=command(config),
        recipe=recipe,
        model=model,
        base=base,
        base_path=config.from_checkpoint,
        lora=lora,
        chat_template=chat_template,
        text=text,
        directory=directory,
        ranks=process.ranks,
        placement=process.placement,
        rank_batch=process.rank_batch,
        length=resolve_length(config, recipe),
        log_every=config.log_every,
        prompts=config.prompts,
        sample_tokens=config.sample_tokens,
        tensorboard=config.tensorboard,
        compiled=compiles(config.compile, process.placement.device),
        sharded=_shards(config, model, process, adapted=lora is not None),
    )


def agree_on_sharding(run: ResolvedRun) -> ResolvedRun:
    """A model is sharded where any process has no room for a copy. All processes have to ask."""
    return replace(run, sharded=bool(run.ranks.all_reduce_max([run.sharded])[0]))


def _shards(config: TrainingConfig, model: GPTConfig, process: Process, *, adapted: bool) -> bool:
    if process.ranks.size == 1 or config.shard == "off":
        return False
    device = process.placement.device
    return config.shard == "on" or worth_sharding(model, device, process.ranks, adapted=adapted)


def _only(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}
