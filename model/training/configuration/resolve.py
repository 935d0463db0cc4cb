"""Resolve: turns the user's settings into a complete description of the run, once, before set-up.

    TrainingConfig     the fields that the user set; most are None
    ResolvedTraining   all values: the preset's or the checkpoint's, overridden by the user's.
                       run.json stores it, and a resumed run reads it from there

These functions open no file and query no device. `model/training/setup/begin.py` opens the files
that a ResolvedTraining names.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from logitd.model.checkpoint.adapter import BaseRecord
from logitd.model.convert.family import nearest, objections
from logitd.model.convert.foreign import ConvertError
from logitd.model.files import is_utf8
from logitd.model.first_error import first_error
from logitd.model.plural import pluralize
from logitd.model.training.configuration.command_line import shown
from logitd.model.training.configuration.config import (
    RECIPE_FIELDS,
    SHAPE_FIELDS,
    TrainingConfig,
    TrainingError,
)
from logitd.model.training.configuration.finetune import (
    WARMUP,
    Base,
    finetuned_model,
    finetuned_recipe,
    lora_shape,
)
from logitd.model.training.configuration.presets import PRESETS, Recipe
from logitd.model.training.optim.schedule import (
    SHORTEST,
    Rewarming,
    lr_scale,
    window_length,
)
from logitd.model.training.step.flops import flops_per_token
from logitd.model.training.stopping.length import Counters, Length
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.lora import LoraShape
from logitd.model.transformer.shapes import padded

NEEDS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "cooldown": ("decay", ("linear",)),
    "final_lr": ("decay", ("linear", "cosine")),
    "momentum": ("optimizer", ("muon",)),
    "rope_theta": ("positions", ("rotary",)),
    "rotary_dim": ("positions", ("rotary",)),
    "rope_scaling": ("positions", ("rotary",)),
    "vocab_size": ("tokenizer", ("own", "the checkpoint's")),
    "keep_every": ("lora", (None,)),  # adapters cannot be served
    "save_dtype": ("lora", (None,)),  # adapters are saved in float32
}
"""Fields that have an effect only if another field has certain values. Each maps to the name of the
other field and to these values; error messages suggest the first value."""
RESUMABLE = frozenset(
    (
        *("resume", "out", "minutes", "device", "threads", "shard", "steps", "log_every"),
        *("eval_every", "patience", "sample_every", "sample_tokens", "prompts"),
        *("checkpoint_every", "keep", "keep_every", "save_dtype", "chat_template"),
        "tensorboard",
        "from_checkpoint",  # may have moved; the hash of its weights identifies it
    )
)
"""Fields that may change when a run is resumed."""
AFTER_THE_END = frozenset(
    (
        *("resume", "out", "device", "threads", "shard", "from_checkpoint", "steps", "minutes"),
        *("keep", "keep_every"),  # apply to the last step too
    )
)
"""Fields that may change when a run without further steps is resumed."""
REWARMING = 0.05
"""Share of the remaining run over which the learning rate rises, if the run was extended."""
LONG_MINUTES, LONG_OPERATIONS = 15.0, 1.5e14
"""On a CPU, `compile` "auto" means "on" for long runs, which have at least LONG_OPERATIONS
operations. If a run has a time limit, the limit must also be at least LONG_MINUTES. On two AVX-512
cores in bfloat16, compiling once took as much time as it saved in a run of half of LONG_OPERATIONS;
a run that begins with short windows compiles twice. The length is measured in operations because a
slower machine also compiles more slowly."""


@dataclass(frozen=True, kw_only=True)
class ResolvedTraining:
    """All settings of a run, except the devices of its processes.

    config  settings of the command that started the run and of the commands that resumed it
    lora    adapters to train instead of the whole model
    base    checkpoint to fine-tune
    """

    config: TrainingConfig
    recipe: Recipe
    model: GPTConfig
    lora: LoraShape | None = None
    base: Base | None = None
    rewarming: Rewarming | None = None  # of a run that was extended or is fine-tuned by the clock

    @property
    def length(self) -> Length:
        """The length of the run. If the user sets minutes but no steps, the preset's steps do not
        limit the run."""
        by_clock = self.config.minutes is not None and self.config.steps is None
        return Length(None if by_clock else self.recipe.steps, self.config.minutes)

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.batch_size * self.recipe.accumulate * self.model.context_length

    @property
    def operations_per_token(self) -> float:
        """Operations for one token, on average over the run."""
        recipe, model = self.recipe, self.model
        short = window_length(recipe, model.context_length, 0.0, self.rewarming)
        part = recipe.short_windows
        return part * flops_per_token(model, short) + (1 - part) * flops_per_token(model)

    def with_vocabulary(
        self, size: int, speed: Callable[["ResolvedTraining"], float] = lambda training: 0.0
    ) -> "ResolvedTraining":
        """A copy of this run with the size of its vocabulary, which is known only after the text
        has been tokenized. This also decides what `compile` "auto" means: for a long run it becomes
        "on", so that the run uses the same kernels after it is resumed; for a short run it stays
        "auto", which compiles only on CUDA. Whether a run without a limit on its steps is long
        depends on its tokens per second, which `speed` measures."""
        resolved = self
        if self.base is None:
            model = replace(self.model, vocab_size=size, padded_vocab_size=padded(size))
            resolved = replace(self, model=model)
        if self.config.compile == "auto" and resolved._is_long(speed):
            resolved = replace(resolved, config=self.config.model_copy(update={"compile": "on"}))
        return resolved

    def _is_long(self, speed: Callable[["ResolvedTraining"], float]) -> bool:
        steps, minutes = self.length.steps, self.length.minutes
        if minutes is not None and minutes < LONG_MINUTES:
            return False
        if steps is None:
            tokens = (minutes or 0) * 60 * speed(self)
        else:
            tokens = float(steps * self.tokens_per_step)
        return tokens * self.operations_per_token >= LONG_OPERATIONS

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
        """Read the result of `to_dict`. Raises TrainingError, ConfigError or LoraError if it is
        invalid."""
        try:
            read = _Document.model_validate(document)
        except ValidationError as error:
            raise TrainingError(first_error(error)) from error
        base = read.base
        return cls(
            config=read.config,
            recipe=read.recipe,
            model=GPTConfig.from_dict(read.model),
            lora=lora_shape(read.config.given()),
            base=None if base is None else Base(base.record.model_dump(), base.chat_template),
            rewarming=read.rewarming,
        )


class _Base(BaseModel):
    record: BaseRecord
    chat_template: str | None


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    config: TrainingConfig
    recipe: Recipe
    model: dict[str, Any]
    base: _Base | None = None
    rewarming: Rewarming | None = None


def resolve(config: TrainingConfig, base: Base | None = None) -> ResolvedTraining:
    """Resolve a new run. The vocabulary's size is taken from the recipe. `base` is the opened
    checkpoint to fine-tune. Raises ConfigError and TrainingError."""
    given = config.given()
    _refuse_texts(given)
    if config.preset not in PRESETS:
        near = get_close_matches(config.preset, PRESETS, 1)
        meant = f"; did you mean {near[0]}?" if near else f": choose from {', '.join(PRESETS)}"
        raise TrainingError(f"--preset {config.preset!r} is unknown{meant}")
    preset = PRESETS[config.preset]
    recipe = replace(preset.recipe, **_only(given, RECIPE_FIELDS))
    lora, rewarming = lora_shape(given), None
    if base is None:
        model = preset.config(recipe.vocab_size, **_only(given, SHAPE_FIELDS))
        if config.exportable:
            model = _exportable_model(model, given)
    else:
        by_clock = "minutes" in given and "steps" not in given
        recipe = finetuned_recipe(given, recipe, lora, by_clock=by_clock)
        if by_clock and "warmup" not in given:
            rewarming = Rewarming(done=0.0, scale=WARMUP, span=WARMUP)
        model = finetuned_model(given, base.opened.config, lora)
        if config.exportable and (found := objections(model)):
            raise TrainingError(
                "--exportable: the checkpoint's shape cannot be exported, and fine-tuning cannot "
                "change it: " + "; ".join(map(str, found))
            )
    if "batch_size" not in given:
        tokens = preset.recipe.batch_size * preset.shape["context_length"]
        recipe = replace(recipe, batch_size=max(1, tokens // model.context_length))
    resolved = ResolvedTraining(
        config=config, recipe=recipe, model=model, lora=lora, base=base, rewarming=rewarming
    )
    _refuse_idle(given, resolved)
    return resolved


def _exportable_model(model: GPTConfig, given: Mapping[str, Any]) -> GPTConfig:
    """The most similar shape that can be exported. A `given` d_ff is kept. Raises TrainingError if
    any other `given` value would have to change."""
    try:
        wanted = nearest(model)
    except ConvertError as error:
        raise TrainingError(f"--exportable: {error}") from error
    values = {field.name: getattr(wanted, field.name) for field in fields(GPTConfig)}
    changes = {name: value for name, value in values.items() if value != getattr(model, name)}
    if "d_ff" in given:
        changes.pop("d_ff", None)
    if refused := sorted(changes.keys() & given.keys()):
        reasons = {each.key: f": {each.reason}" for each in objections(model)}
        listed = "; ".join(
            f"{name} is {given[name]!r}, but must be {changes[name]!r}{reasons.get(name, '')}"
            for name in refused
        )
        raise TrainingError(f"--exportable: {listed}")
    return replace(model, **changes)


def fit_context(
    training: ResolvedTraining, given: Collection[str], tokens: int
) -> ResolvedTraining:
    """The run with a context that `tokens` tokens fill. The context is halved down to SHORTEST
    positions, and a batch keeps its tokens. The shape of a base and `given` fields stay."""
    model, recipe = training.model, training.recipe
    if training.base is not None or "context_length" in given:
        return training
    context = model.context_length
    while tokens <= context > SHORTEST:
        context //= 2
    if "batch_size" not in given:
        batch = recipe.batch_size * model.context_length // context
        recipe = replace(recipe, batch_size=batch)
    return replace(training, model=replace(model, context_length=context), recipe=recipe)


def _refuse_texts(given: Mapping[str, Any]) -> None:
    """Raise TrainingError for an empty prompt, and for a path or text that run.json and the
    checkpoints' cards cannot contain."""
    if "" in given.get("prompts", ()):
        raise TrainingError("--prompts '' has no text to continue: write one, or remove it")
    for name, value in given.items():
        for each in value if isinstance(value, tuple) else (value,):
            if not is_utf8(str(each)):
                raise TrainingError(
                    f"{name} is {str(each)!a}, which is not valid UTF-8, so run.json and the "
                    "checkpoints' cards cannot name it: rename it"
                )


def _refuse_idle(given: Mapping[str, Any], training: ResolvedTraining) -> None:
    recipe, steps = training.recipe, training.length.steps
    lora = None if training.lora is None else training.lora.rank
    values = {**training.model.to_dict(), **asdict(recipe), "lora": lora}
    for name in sorted(given.keys() & NEEDS.keys()):
        other, acting = NEEDS[name]
        if values[other] not in acting:
            instead = f"set {other} to {acting[0]}" if acting[0] else f"remove {other}"
            raise TrainingError(
                f"{name} is {given[name]}, but has no effect while {other} is {values[other]}: "
                f"remove {name}, or {instead}"
            )
    length = training.model.context_length
    if given.get("short_windows") and window_length(recipe, length, 0.0) == length:
        raise TrainingError(
            f"short_windows is {recipe.short_windows}, but has no effect with a context_length of "
            f"{length}, because short windows have at least {SHORTEST} tokens: remove it"
        )
    if "warmup" in given and steps is not None and recipe.warmup >= steps:
        raise TrainingError(
            f"warmup is {recipe.warmup}, but the run has {steps} steps, so the learning rate never "
            f"reaches its peak: set warmup below {steps}, or steps above {recipe.warmup}"
        )


def resolve_resumed(
    config: TrainingConfig, before: ResolvedTraining, saved: Counters
) -> ResolvedTraining:
    """Resolve the settings of a resumed run; `saved` are the counters of its last saved state.
    Raises TrainingError if a field that is not in RESUMABLE changes. If the new length raises the
    learning rate, the rate rises gradually, as in Ibrahim et al. (2024)."""
    given = config.given()
    _refuse_texts(given)
    values = {name: field.default for name, field in TrainingConfig.model_fields.items()}
    values |= {**before.model.to_dict(), "rope_scaling": before.model.rope_scaling}
    values |= {**asdict(before.recipe), **before.config.given()}
    for name in sorted(given.keys() - RESUMABLE):
        if given[name] != values[name]:
            raise TrainingError(
                f"--{name.replace('_', '-')} cannot change when a run is resumed: it is "
                f"{shown(given[name])} now and was {shown(values[name])}; leave it out"
            )
    training = replace(
        before,
        config=TrainingConfig(**{**before.config.to_dict(), **config.to_dict()}),
        recipe=replace(before.recipe, **_only(given, RECIPE_FIELDS)),
    )
    _refuse_idle(given, training)
    if "from_checkpoint" in given and before.base is None:
        raise TrainingError(
            f"--from {given['from_checkpoint']} has no effect: the run began with random weights; "
            "leave it out"
        )
    if not saved.step:
        return training
    lengthened = training.length != before.length
    if lengthened:
        _refuse_ended(given, training.length, saved)
    if training.length.is_over(saved):
        changed = {name for name, value in given.items() if value != values[name]}
        _refuse_late(given, changed - AFTER_THE_END, saved)
    if not lengthened:
        return training
    done = training.length.done(saved)
    was = lr_scale(before.recipe, saved.step, before.length.scheduled(saved), before.rewarming)
    if lr_scale(training.recipe, saved.step, done) <= was:
        return replace(training, rewarming=None)
    return replace(training, rewarming=Rewarming(done=done, scale=was, span=REWARMING * (1 - done)))


def _refuse_ended(given: Mapping[str, Any], length: Length, saved: Counters) -> None:
    """Raise TrainingError if a `given` length is shorter than the run already is, or if only
    --steps or only --minutes is given and the run has reached the other limit."""
    over = {"minutes": length.is_over_by_clock(saved), "steps": length.is_over_by_steps(saved)}
    done = f"{pluralize(saved.step, 'step')} in {saved.seconds / 60:.1f} minutes"
    past = {"minutes": over["minutes"], "steps": saved.step > (length.steps or saved.step)}
    for name in ("steps", "minutes"):
        if name in given and past[name]:
            raise TrainingError(
                f"--{name} {given[name]:g} counts the whole run, which has done {done}: increase "
                f"--{name}, or leave it out"
            )
    for name, other in (("steps", "minutes"), ("minutes", "steps")):
        if name in given and other not in given and over[other]:
            raise TrainingError(
                f"--{name} {given[name]:g} cannot be reached: the run has done {done}, and "
                f"--{other} {getattr(length, other):g} limits the whole run. Increase --{other} too"
            )


def _refuse_late(given: Mapping[str, Any], late: Collection[str], saved: Counters) -> None:
    """Raise TrainingError if settings of a run's steps change after its last step."""
    for name in sorted(late):
        raise TrainingError(
            f"--{name.replace('_', '-')} {shown(given[name])} has no effect: the run ended at step "
            f"{saved.step}; leave it out, or make the run longer with --steps or --minutes"
        )


def _only(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}
