"""What a configuration comes to."""

import pytest

from model.training.config import TrainingConfig, TrainingError
from model.training.presets import PRESETS
from model.training.resolve import resolve_config, resolve_resumed
from model.training.run.description import RunDescription


def test_what_is_not_given_is_the_presets() -> None:
    resolution = resolve_config(TrainingConfig(preset="decoder-8x64"))
    assert resolution.recipe == PRESETS["decoder-8x64"].recipe
    config = TrainingConfig(preset="decoder-8x64", norm_position="pre", steps=7)
    resolution = resolve_config(config)
    model = resolution.model(300)
    assert (resolution.recipe.steps, model.norm_position, model.d_model) == (7, "pre", 64)
    assert model.vocab_size == 300


def test_a_size_beside_a_published_vocabulary_is_refused() -> None:
    with pytest.raises(TrainingError, match="vocab_size 500 was given, but the tokenizer 'gpt2'"):
        resolve_config(TrainingConfig(tokenizer="gpt2", vocab_size=500))


def test_a_resumed_run_may_be_lengthened_but_not_changed() -> None:
    first = TrainingConfig(steps=100, d_model=64)
    resolution = resolve_config(first)
    before = RunDescription(first, resolution.recipe, resolution.model(1024))
    longer = resolve_resumed(TrainingConfig(resume=True, steps=200), before)
    assert (longer.recipe.steps, longer.config.steps, longer.config.d_model) == (200, 200, 64)
    assert longer.model == before.model
    assert resolve_resumed(TrainingConfig(resume=True, d_model=64), before) == before
    for change, was in (
        ({"d_model": 128}, "it is 128 now and was 64"),
        ({"seed": 2}, "it is 2 now and was 1337"),
        ({"data": ("x.txt",)}, r"was \(\)"),
    ):
        with pytest.raises(TrainingError, match=was):
            resolve_resumed(TrainingConfig(resume=True, **change), before)
