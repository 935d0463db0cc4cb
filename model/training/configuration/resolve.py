"""Resolve: from what the user set to a run with everything decided, once and before set-up.

    TrainingConfig     the fields that the user set; most are None
    ResolvedTraining   the preset's or the checkpoint's values, and the user's over them. run.json
                       keeps it; a resumed run takes it from there

`model/training/setup/begin.py` opens what a ResolvedTraining names. Pure functions: nothing here
opens a file or asks a device.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from logitd.model.convert.family import nearest, objections
from logitd.model.convert.foreign import ConvertError
from logitd.model.training.configuration.config import (
    NEEDS,
    RECIPE_FIELDS,
    RESUMABLE,
    SHAPE_FIELDS,
    TrainingConfig,
    TrainingError,
    run_name,
)
from logitd.model.training.configuration.finetune import Base, lora_shape, resolve_finetune
from logitd.model.training.configuration.presets import Recipe, Rewarming, preset
from logitd.model.training.step.flops import flops_per_token
from logitd.model.training.stopping.length import Length
from logitd.model.transformer.config import GPTConfig, padded
from logitd.model.transformer.lora import LoraShape

LONG_MINUTES, LONG_BY_CLOCK, LONG_OPERATIONS = 15.0, 1e14, 1.5e14
"""Length from which a run on a CPU is compiled: by the clock one and a half times, by steps twice
what it takes to earn the compiling back, on two AVX-512 cores in bfloat16. It is in operations, as
a slower machine also compiles more slowly."""


@dataclass(frozen=True, kw_only=True)
class ResolvedTraining:
    """A run with everything decided but where each of its processes computes.

    config  the settings of all commands that this run was given to
    base    the checkpoint that it fine-tunes
    """

    config: TrainingConfig
    recipe: Recipe
    model: GPTConfig
    base: Base | None = None
    rewarming: Rewarming | None = None  # of a run that was made longer

    @property
    def name(self) -> str:
        return run_name(self.config)

    @property
    def lora(self) -> LoraShape | None:
        return lora_shape(self.config.given())

    @property
    def length(self) -> Length:
        """The end of the run: minutes without steps replace the preset's steps."""
        by_clock = self.config.minutes is not None and self.config.steps is None
        return Length(None if by_clock else self.recipe.steps, self.config.minutes)

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.batch_size * self.recipe.accumulate * self.model.context_length

    @property
    def needs_speed(self) -> bool:
        """True if only a measured speed tells whether the run is long enough to be compiled."""
        by_clock = self.length.steps is None and (self.length.minutes or 0) >= LONG_MINUTES
        return by_clock and self.config.compile == "auto"

    def with_vocabulary(self, size: int, speed: float = 0.0) -> "ResolvedTraining":
        """The same run with the vocabulary's size, which is known when the text is tokenised. A
        long run is compiled, and `compile` auto is replaced, so that a resumed run computes with
        the same kernels; in a short one auto stays, and compiles on CUDA. `speed`: measured tokens
        per second of a run that the clock ends (`needs_speed`)."""
        resolved = self
        if self.base is None:
            model = replace(self.model, vocab_size=size, padded_vocab_size=padded(size))
            resolved = replace(self, model=model)
        if self.config.compile == "auto" and resolved._is_long(speed):
            resolved = replace(resolved, config=self.config.model_copy(update={"compile": "on"}))
        return resolved

    def _is_long(self, speed: float) -> bool:
        steps, minutes = self.length.steps, self.length.minutes
        if minutes is not None and minutes < LONG_MINUTES:
            return False
        operations = flops_per_token(self.model)
        if steps is None:
            return (minutes or 0) * 60 * speed * operations >= LONG_BY_CLOCK
        return steps * self.tokens_per_step * operations >= LONG_OPERATIONS

    def to_dict(self) -> dict[str, Any]:
        """The contents of run.json."""
        document = {
            "config": self.config.to_dict(),
            "recipe": asdict(self.recipe),
            "model": self.model.to_dict(),
        }
        if self.rewarming is not None:
            document["rewarming"] = asdict(self.rewarming)
        return document if self.base is None else {**document, "base": self.base.to_dict()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "ResolvedTraining":
        """Read what `to_dict` returned. Raises KeyError, TypeError or ValueError for anything
        else."""
        base, rewarming = document.get("base"), document.get("rewarming")
        return cls(
            config=TrainingConfig(**document["config"]),
            recipe=Recipe(**document["recipe"]),
            model=GPTConfig.from_dict(document["model"]),
            base=None if base is None else Base(base["record"], base["chat_template"]),
            rewarming=None if rewarming is None else Rewarming(**rewarming),
        )


def resolve(config: TrainingConfig, base: Base | None = None) -> ResolvedTraining:
    """Resolve a new run, for a vocabulary of the recipe's size. `base` is the opened checkpoint of
    a fine-tuned one. Raises PresetError, ConfigError and TrainingError."""
    given = config.given()
    start = preset(config.preset)
    recipe = replace(start.recipe, **_only(given, RECIPE_FIELDS))
    lora = lora_shape(given)
    if base is not None:
        recipe, model = resolve_finetune(given, recipe, base.opened.config, lora)
        if config.exportable and (found := objections(model)):
            raise TrainingError(
                "--exportable: the shape of the checkpoint stays, and cannot be exported: "
                + "; ".join(map(str, found))
            )
    else:
        model = start.config(recipe.vocab_size, **_only(given, SHAPE_FIELDS))
        if config.exportable:
            model = replace(model, **_exportable_changes(model, given))
    resolved = ResolvedTraining(config=config, recipe=recipe, model=model, base=base)
    _refuse_idle(given, resolved)
    return resolved


def _refuse_idle(given: Mapping[str, Any], training: ResolvedTraining) -> None:
    """Raise TrainingError for a given field that does nothing next to the others."""
    recipe, steps = training.recipe, training.length.steps
    values = {**training.model.to_dict(), **asdict(recipe), "lora": given.get("lora")}
    for name in sorted(given.keys() & NEEDS.keys()):
        other, acting = NEEDS[name]
        if values[other] not in acting:
            instead = f"set {other} to {acting[0]}" if acting[0] else f"remove {other}"
            raise TrainingError(
                f"{name} is {given[name]}, but does nothing while {other} is {values[other]}: "
                f"remove {name}, or {instead}"
            )
    if "warmup" in given and steps is not None and recipe.warmup >= steps:
        raise TrainingError(
            f"warmup is {recipe.warmup}, but the run has {steps} steps, so the learning rate never "
            f"reaches its peak: set warmup below {steps}, or steps above {recipe.warmup}"
        )


def resolve_resumed(config: TrainingConfig, before: ResolvedTraining) -> ResolvedTraining:
    """Resolve a run that exists, with the fields that may be set again. Raises TrainingError for
    any other field that is set and differs."""
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


def _exportable_changes(model: GPTConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a shape that `logitd export` needs to differ (`model/convert/family.py`). A
    given width of the feed-forward stays; another `given` value raises TrainingError."""
    try:
        wanted = nearest(model)
    except ConvertError as error:
        raise TrainingError(f"--exportable: {error}") from error
    names = [field.name for field in fields(GPTConfig)]
    changes = {
        name: getattr(wanted, name)
        for name in names
        if getattr(wanted, name) != getattr(model, name)
    }
    if "d_ff" in given:
        changes.pop("d_ff", None)
    if refused := sorted(changes.keys() & given.keys()):
        reasons = {objection.key: objection.reason for objection in objections(model)}
        listed = "; ".join(
            f"{name} is {given[name]!r}, but must be {changes[name]!r}"
            + (f": {reasons[name]}" if name in reasons else "")
            for name in refused
        )
        raise TrainingError(f"--exportable: {listed}")
    return changes


def _only(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}
