"""The settings of a run: their names, their limits, and their command line."""

import json
import shlex
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from logitd.model.training.configuration.command_line import OMITTED, command
from logitd.model.training.configuration.config import SHAPE_FIELDS, TrainingConfig
from logitd.model.training.configuration.presets import Recipe
from logitd.model.training.configuration.resolve import NEEDS, RESUMABLE
from logitd.model.transformer.config import GPTConfig, RopeScaling
from tests.service.cli.parsed import parsed


def test_every_field_of_a_recipe_and_a_shape_has_a_described_setting() -> None:
    names = set(TrainingConfig.model_fields)
    assert {field.name for field in fields(Recipe)} <= names
    shape = {field.name for field in fields(GPTConfig)} - {"vocab_size", "padded_vocab_size"}
    shape -= {"norm_eps"}  # depends on the kind of norm
    assert set(SHAPE_FIELDS) == shape
    assert names >= RESUMABLE
    assert names >= {*NEEDS, *(other for other, _ in NEEDS.values())}
    assert all(field.description for field in TrainingConfig.model_fields.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"minutes": 0},
        {"matrix_lr": float("nan")},
        {"val_fraction": 0.9},
        {"dropout": 1.0},
        {"vocab_size": 256},
        {"optimizer": "sgd"},
        {"stepz": 5},
        {"rotary_dim": 0},
        {"residual": "both"},
        {"rope_scaling": {"kind": "linear"}},
        {"rope_scaling": {"kind": "linear", "factor": "2"}},
        {"rope_scaling": {"kind": "linear", "factor": 2.0, "color": "red"}},
    ],
)
def test_config_refuses_impossible_values_and_unknown_names(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingConfig(**wrong)


TEXTS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
) | st.sampled_from(["a, b", ' "a, b" ', "a,", "", "--", "--data", "-x", "'", "two\nlines"])
YARN = {"kind": "yarn", "factor": 4, "original_context_length": 64}
KINDS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(1, 10**6),
    float: st.floats(0, 1) | st.floats(1, exclude_min=True),
    str: TEXTS,
    Path: TEXTS.map(Path),
    RopeScaling: st.just(YARN),
    NoneType: st.none(),
}
"""Values of each type of a setting. A setting may allow only some of them."""


def values(kind: Any) -> st.SearchStrategy[Any]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is None:
        return KINDS[kind]
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple:
        return st.lists(values(parts[0]), min_size=1, max_size=3)
    return st.one_of([values(each) for each in (parts[:1] if origin is Annotated else parts)])


@st.composite
def configs(draw: st.DrawFn) -> TrainingConfig:
    """Any settings, some of which could not be resolved."""
    names = st.sets(st.sampled_from(sorted(TrainingConfig.model_fields)), max_size=5)
    found = {}
    for name in draw(names):
        value = draw(values(TrainingConfig.model_fields[name].annotation))
        with suppress(ValidationError):
            TrainingConfig(**{name: value})
            found[name] = value
    return TrainingConfig(**found)


@given(configs())
@example(TrainingConfig(windows=(8, None), prompts=("Hello, world", "", "--", " a ")))
@example(TrainingConfig(data=("Smith, John.txt", "--data"), value_embeddings=True))
@example(TrainingConfig(rope_scaling=YARN, lora_targets=("qkv", "mlp_up"), bias=False))
def test_settings_round_trip_through_json_and_the_command(config: TrainingConfig) -> None:
    settings = config.given()
    stored = json.loads(json.dumps(config.to_dict()))
    assert TrainingConfig(**stored, resume=config.resume) == config
    program, name, *flags = shlex.split(command(config))
    assert (program, name) == ("logitd", "train")
    kept = {name: value for name, value in settings.items() if name not in OMITTED}
    assert parsed("train", *flags).given() == {"preset": config.preset, **kept}


def test_command_has_only_the_given_settings() -> None:
    config = TrainingConfig(
        preset="small",
        data=("my text.txt", "b.txt"),
        out=Path("/somewhere"),
        threads=2,
        steps=5,
        tied_head=False,
        qkv_bias=True,
        device="cpu",
    )
    assert command(config) == (
        "logitd train --preset small --data 'my text.txt' --data b.txt "
        "--qkv-bias --no-tied-head --steps 5"
    )
