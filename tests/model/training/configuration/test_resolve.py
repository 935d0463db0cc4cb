"""Resolved settings of new and resumed runs."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.configuration.resolve import REWARMING, resolve, resolve_resumed
from logitd.model.training.optim.schedule import lr_scale
from logitd.model.training.stopping.length import Counters
from logitd.model.transformer.config import ConfigError, RopeScaling
from logitd.model.transformer.lora import LoraShape

SAVED = Counters(step=5)


def test_resolve_takes_missing_fields_from_the_preset() -> None:
    resolution = resolve(TrainingConfig(preset="decoder-8x64"))
    assert resolution.recipe == PRESETS["decoder-8x64"].recipe
    config = TrainingConfig(preset="decoder-8x64", norm_position="pre", steps=7)
    resolution = resolve(config)
    model = resolution.with_vocabulary(300).model
    assert (resolution.recipe.steps, model.norm_position, model.d_model) == (7, "pre", 64)
    assert model.vocab_size == 300


def test_batches_of_another_context_have_as_many_tokens() -> None:
    """A preset with few sequences and a long context once trained on 128 tokens in a step if a
    short context was set."""
    for context, batch in ((1024, 2), (64, 32), (96, 21), (4096, 1)):
        assert resolve(TrainingConfig(context_length=context)).recipe.batch_size == batch
    assert resolve(TrainingConfig(context_length=64, batch_size=3)).recipe.batch_size == 3


def test_final_norm_follows_the_norm_position_unless_given() -> None:
    for norm_position, given, final in (
        *(("pre", None, True), ("post", None, False)),
        *(("pre", False, False), ("post", True, True)),
    ):
        config = TrainingConfig(
            preset="decoder-8x64", norm_position=norm_position, final_norm=given
        )
        assert resolve(config).model.final_norm is final


def test_resolve_refuses_rotary_fields_with_other_positions() -> None:
    with pytest.raises(ConfigError, match="rotary_dim is 32, but positions are learned"):
        resolve(TrainingConfig(preset="nanogpt", rotary_dim=32))
    assert resolve(TrainingConfig(preset="tiny", rotary_dim=32)).model.rotary_dim == 32


@pytest.mark.parametrize(
    ("given", "field", "other"),
    [
        ({"tokenizer": "gpt2", "vocab_size": 500}, "vocab_size", "tokenizer is gpt2"),
        ({"decay": "cosine", "cooldown": 0.1}, "cooldown", "decay is cosine"),
        ({"preset": "nanogpt", "cooldown": 0.1}, "cooldown", "decay is cosine"),
        ({"decay": "constant", "final_lr": 0.5}, "final_lr", "decay is constant"),
        ({"optimizer": "adamw", "momentum": 0.1}, "momentum", "optimizer is adamw"),
        ({"positions": "learned", "rope_theta": 5.0}, "rope_theta", "positions is learned"),
        ({"warmup": 100, "steps": 6}, "warmup", "6 steps"),
        ({"short_windows": 0.3, "context_length": 128}, "short_windows", "context_length of 128"),
    ],
)
def test_resolve_refuses_a_field_that_does_nothing(
    given: dict[str, Any], field: str, other: str
) -> None:
    with pytest.raises(TrainingError, match=f"^{field} is {given[field]}, but .*{other}"):
        resolve(TrainingConfig(**given))
    others = {name: value for name, value in given.items() if name != field}
    resolve(TrainingConfig(**others))
    resolve(TrainingConfig(**{field: given[field]}))


@pytest.mark.parametrize(
    "given", [{"data": ("a", "caf\udce9")}, {"out": Path("\udce9")}, {"prompts": ("\udce9",)}]
)
def test_names_that_are_not_utf8_are_refused(given: dict[str, Any]) -> None:
    before = resolve(TrainingConfig())
    for resolved in (resolve, lambda config: resolve_resumed(config, before, Counters())):
        with pytest.raises(TrainingError, match=f"{next(iter(given))} is .*udce9.*not valid UTF-8"):
            resolved(TrainingConfig(**given))


def test_resumed_run_may_be_lengthened_but_not_changed() -> None:
    first = TrainingConfig(steps=100, d_model=64)
    before = resolve(first).with_vocabulary(1000)
    longer = resolve_resumed(TrainingConfig(resume=True, steps=200), before, SAVED)
    assert (longer.recipe.steps, longer.config.steps, longer.config.d_model) == (200, 200, 64)
    assert longer.model == before.model
    assert resolve_resumed(TrainingConfig(resume=True, d_model=64), before, SAVED) == before
    scaled = RopeScaling(kind="linear", factor=2.0)
    with pytest.raises(TrainingError, match="--rope-scaling cannot change when a run is resumed"):
        resolve_resumed(TrainingConfig(resume=True, rope_scaling=scaled), before, SAVED)
    stretched = replace(before, model=replace(before.model, rope_scaling=scaled))
    resolve_resumed(TrainingConfig(resume=True, rope_scaling=scaled), stretched, SAVED)
    for change, was in (
        ({"d_model": 128}, "it is 128 now and was 64"),
        ({"seed": 2}, "it is 2 now and was 1337"),
        ({"prompts": ("a", "")}, "^--prompts ''"),
        ({"windows": (8, None)}, "^--windows .*it is 8,all now and was not set; leave it out"),
        ({"data": ("x.txt",)}, "^--data cannot .*it is x.txt now and was not set; leave it out"),
        ({"matrix_lr": 1.0}, "^--matrix-lr cannot change"),
        ({"eval_batches": 1}, "^--eval-batches cannot change"),  # decides which loss is the best
        ({"from_checkpoint": "base"}, "^--from base has no effect: .*random weights"),
    ):
        with pytest.raises(TrainingError, match=was):
            resolve_resumed(TrainingConfig(resume=True, **change), before, SAVED)
    adapted = replace(before, lora=LoraShape(2, 2.0, ("qkv",)))
    for name, value in (("keep_every", 5), ("save_dtype", "bfloat16")):
        with pytest.raises(TrainingError, match=f"{name} is {value}, .* lora is 2: remove"):
            resolve_resumed(TrainingConfig(resume=True, **{name: value}), adapted, SAVED)


@pytest.mark.parametrize(
    ("first", "again", "said"),
    [
        ({"minutes": 1}, {"steps": 200}, "--steps 200 cannot be reached.*--minutes 1 "),
        ({"steps": 90}, {"minutes": 9}, "--minutes 9 cannot be reached.*--steps 90 "),
        ({}, {"minutes": 9}, None),  # minutes replace the preset's steps
        ({"steps": 90, "minutes": 9}, {"minutes": 60}, "--minutes 60 cannot be .*--steps 90 "),
        ({"steps": 90, "minutes": 9}, {"minutes": 60, "steps": 91}, None),
        ({"steps": 90, "minutes": 9}, {"steps": 90, "minutes": 9}, None),  # started again
        ({"steps": 200}, {"steps": 89}, "--steps 89 counts the whole run, .* 90 steps .*increase"),
        ({"steps": 200}, {"steps": 90}, None),
        ({"minutes": 3}, {"minutes": 1}, "--minutes 1 counts the whole run, .* 1.2 minutes"),
        ({"minutes": 1}, {"minutes": 3}, None),
    ],
)
def test_length_that_cannot_be_reached_is_refused(
    first: dict[str, Any], again: dict[str, Any], said: str | None
) -> None:
    before = resolve(TrainingConfig(**first))
    saved, config = Counters(step=90, seconds=70.0), TrainingConfig(resume=True, **again)
    with nullcontext() if said is None else pytest.raises(TrainingError, match=said):
        resolve_resumed(config, before, saved)


@pytest.mark.parametrize(
    "late",
    [
        {"chat_template": Path("chat.jinja")}, {"log_every": 3}, {"prompts": ("a",)},
        {"patience": 2}, {"save_dtype": "bfloat16"}, {"tensorboard": True},
    ],
)  # fmt: skip
def test_setting_of_steps_is_refused_after_the_last_step(late: dict[str, Any]) -> None:
    before, ended = resolve(TrainingConfig(steps=90)), Counters(step=90)
    flag = "--" + next(iter(late)).replace("_", "-")
    with pytest.raises(TrainingError, match=f"{flag} .* no effect: the run ended at step 90; "):
        resolve_resumed(TrainingConfig(resume=True, **late), before, ended)
    with pytest.raises(TrainingError, match=f"{flag} .* no effect"):
        resolve_resumed(TrainingConfig(resume=True, steps=90, **late), before, ended)
    for again, saved in (({"steps": 91}, ended), ({}, Counters(step=89)), ({}, Counters())):
        resolve_resumed(TrainingConfig(resume=True, **late, **again), before, saved)
    same = resolve(TrainingConfig(steps=90, **late))
    resolve_resumed(TrainingConfig(resume=True, **late, threads=2, keep=1), same, ended)


def test_learning_rate_of_a_single_step_that_the_clock_ended_has_not_fallen() -> None:
    before = resolve(TrainingConfig(minutes=1))
    saved = Counters(step=1, seconds=70.0, setup=65.0, minutes=1.0)
    assert resolve_resumed(TrainingConfig(resume=True, minutes=9), before, saved).rewarming is None
    planned = replace(saved, step=20, pace=0.1, share=1.0)
    longer = resolve_resumed(TrainingConfig(resume=True, minutes=9), before, planned)
    assert longer.rewarming is not None
    assert longer.rewarming.scale == 0


@pytest.mark.parametrize(("steps", "rises"), [(200, True), (100, False), (95, False)])
def test_learning_rate_of_a_lengthened_run_rises_without_a_jump(steps: int, rises: bool) -> None:
    before = resolve(TrainingConfig(steps=100))
    saved = Counters(step=90)
    was = lr_scale(before.recipe, 90, before.length.done(saved))
    longer = resolve_resumed(TrainingConfig(resume=True, steps=steps), before, saved)
    assert (longer.rewarming is not None) is rises
    if longer.rewarming is None:
        return

    def scale_at(step: int) -> float:
        done = longer.length.done(Counters(step=step))
        return lr_scale(longer.recipe, step, done, longer.rewarming)

    scales = [scale_at(step) for step in range(90, 200)]
    assert scales[0] == pytest.approx(was)
    peak = max(scales)
    assert scales.index(peak) == round(REWARMING * (200 - 90))
    assert scales[: scales.index(peak) + 1] == sorted(scales[: scales.index(peak) + 1])
    unbroken = resolve(TrainingConfig(steps=200))
    assert scale_at(150) == lr_scale(unbroken.recipe, 150, 150 / 200)
    again = resolve_resumed(TrainingConfig(resume=True, log_every=3), longer, Counters(step=92))
    assert again.rewarming == longer.rewarming
