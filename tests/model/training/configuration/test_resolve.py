"""What a configuration comes to."""

from dataclasses import replace
from typing import Any

import pytest

from logitd.model.training.configuration.config import NEEDS, TrainingConfig, TrainingError
from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.configuration.resolve import resolve, resolve_resumed
from logitd.model.transformer.config import ConfigError, RopeScaling


def test_what_is_not_given_is_the_presets() -> None:
    resolution = resolve(TrainingConfig(preset="decoder-8x64"))
    assert resolution.recipe == PRESETS["decoder-8x64"].recipe
    config = TrainingConfig(preset="decoder-8x64", norm_position="pre", steps=7)
    resolution = resolve(config)
    model = resolution.with_vocabulary(300).model
    assert (resolution.recipe.steps, model.norm_position, model.d_model) == (7, "pre", 64)
    assert model.vocab_size == 300


def test_a_norm_at_the_end_goes_with_the_norms_unless_it_is_said() -> None:
    for norm_position, given, final in (
        *(("pre", None, True), ("post", None, False)),
        *(("pre", False, False), ("post", True, True)),
    ):
        config = TrainingConfig(
            preset="decoder-8x64", norm_position=norm_position, final_norm=given
        )
        assert resolve(config).model.final_norm is final


def test_what_goes_with_other_positions_alone_is_refused_before_the_text_is_read() -> None:
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
    ],
)
def test_a_field_that_does_nothing_next_to_another_is_refused(
    given: dict[str, Any], field: str, other: str
) -> None:
    with pytest.raises(TrainingError, match=f"^{field} is {given[field]}, but .*{other}"):
        resolve(TrainingConfig(**given))
    others = {name: value for name, value in given.items() if name != field}
    resolve(TrainingConfig(**others))
    resolve(TrainingConfig(**{field: given[field]}))


def test_fields_that_need_another_and_what_they_need_exist() -> None:
    for name, (other, _) in NEEDS.items():
        assert {name, other} <= TrainingConfig.model_fields.keys()


def test_a_resumed_run_may_be_lengthened_but_not_changed() -> None:
    first = TrainingConfig(steps=100, d_model=64)
    before = resolve(first).with_vocabulary(1000)
    longer = resolve_resumed(TrainingConfig(resume=True, steps=200), before)
    assert (longer.recipe.steps, longer.config.steps, longer.config.d_model) == (200, 200, 64)
    assert longer.model == before.model
    assert resolve_resumed(TrainingConfig(resume=True, d_model=64), before) == before
    scaled = RopeScaling(kind="linear", factor=2.0)
    with pytest.raises(TrainingError, match="rope_scaling cannot change when a run is resumed"):
        resolve_resumed(TrainingConfig(resume=True, rope_scaling=scaled), before)
    stretched = replace(before, model=replace(before.model, rope_scaling=scaled))
    resolve_resumed(TrainingConfig(resume=True, rope_scaling=scaled), stretched)
    for change, was in (
        ({"d_model": 128}, "it is 128 now and was 64"),
        ({"seed": 2}, "it is 2 now and was 1337"),
        ({"data": ("x.txt",)}, r"was \(\)"),
    ):
        with pytest.raises(TrainingError, match=was):
            resolve_resumed(TrainingConfig(resume=True, **change), before)
