"""The settings of a run: their names, their limits, and their command line."""

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from logitd.model.training.configuration.config import SHAPE_FIELDS, TrainingConfig
from logitd.model.training.configuration.presets import Recipe
from logitd.model.training.configuration.resolve import NEEDS, RESUMABLE
from logitd.model.training.recording.card import command
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


def test_rope_scaling_round_trips_through_json_and_the_command() -> None:
    given = {"kind": "yarn", "factor": 4, "original_context_length": 64}
    config = TrainingConfig(rope_scaling=given)
    assert config.rope_scaling == RopeScaling.from_dict(given)
    assert TrainingConfig(**json.loads(json.dumps(config.to_dict()))) == config
    *_, flag, value = shlex.split(command(config))
    assert flag == "--rope-scaling"
    assert parsed("train", flag, value).given() == config.given()


@pytest.mark.parametrize("value", [True, False, "all"])
def test_value_embeddings_round_trip_through_the_command(value: bool | str) -> None:
    config = TrainingConfig(value_embeddings=value)
    *_, flag, word = shlex.split(command(config))
    assert parsed("train", flag, word).given() == config.given()


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
