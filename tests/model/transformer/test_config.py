"""GPTConfig: what it refuses, in which words, and its way through JSON."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from logitd.model.transformer.config import MODERN, ConfigError, GPTConfig, gpt2_shape, padded
from tests.model.factories import FAMILIES, tiny_config
from tests.model.shapes import shapes


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({"context_length": -1}, "context_length is -1; it must be at least 1"),
        ({"n_layer": 0}, "n_layer is 0; it must be at least 1"),
        ({"n_kv_head": 0}, "n_kv_head is 0; it must be at least 1"),
        ({"head_dim": 0}, "head_dim is 0; it must be at least 1"),
        ({"d_ff": 0}, "d_ff is 0; it must be at least 1"),
        ({"padded_vocab_size": 256}, "padded_vocab_size 256 is below vocab_size 257"),
        (
            {"d_model": 30},
            "d_model 30 is not divisible by n_head 4: "
            "the heads share the width equally unless head_dim is given",
        ),
        (
            {"n_head": 0},
            "d_model 32 is not divisible by n_head 0: "
            "the heads share the width equally unless head_dim is given",
        ),
        (
            {"n_kv_head": 3},
            "n_head 4 is not a multiple of n_kv_head 3: "
            "each key/value head serves the same number of query heads",
        ),
        (
            {"positions": "rotary", "head_dim": 7},
            "head_dim 7 is odd; rotary positions turn pairs, so it must be even",
        ),
        ({"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
        ({"dropout": -0.1}, "dropout is -0.1; it must be at least 0 and below 1"),
        ({"dropout": float("nan")}, "dropout is nan; it must be at least 0 and below 1"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; it must be above 0 and below 1"),
        ({"norm_eps": float("nan")}, "norm_eps is nan; it must be above 0 and below 1"),
        (
            {"positions": "rotary", "rope_theta": 1.0},
            "rope_theta is 1.0; it must be finite and above 1",
        ),
        (
            {"norm_position": "post", "residual": "parallel"},
            "residual is 'parallel' and norm_position 'post': there is no sum between the "
            "sublayers whose norm could follow; parallel goes with norm_position 'pre'",
        ),
        *(
            (
                {"positions": "rotary", "rotary_dim": wrong},
                f"rotary_dim is {wrong}; channels turn in pairs, so it must be even and from 2 to "
                "head_dim, 8",
            )
            for wrong in (0, 3, 10)
        ),
        (
            {"rotary_dim": 4},
            "rotary_dim is 4, but positions are learned; only rotary ones turn: leave it at 8",
        ),
        (
            {"positions": "sinusoidal", "rope_scaling": {"kind": "linear", "factor": 2.0}},
            'rope_scaling is {"kind": "linear", "factor": 2.0}, but positions are sinusoidal; only '
            "rotary ones turn: leave it at None",
        ),
    ],
)
def test_an_impossible_shape_is_refused(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        tiny_config(**overrides)


def test_what_only_rotary_positions_ask_is_asked_of_them_alone() -> None:
    assert tiny_config(positions="learned", head_dim=7, rope_theta=1.0).head_dim == 7


def test_a_given_head_dim_frees_the_width() -> None:
    config = tiny_config(d_model=30, n_head=4, n_kv_head=2, head_dim=6)
    assert config.qkv_width == (4 + 2 + 2) * 6
    assert config.kv_width == 2 * 6


def test_gpt2_shape_is_gpt2() -> None:
    config = gpt2_shape(vocab_size=50257, context_length=1024, n_layer=12, n_head=12, d_model=768)
    assert config.to_dict() == {
        "vocab_size": 50257,
        "padded_vocab_size": 50304,
        "context_length": 1024,
        "n_layer": 12,
        "n_head": 12,
        "n_kv_head": 12,
        "head_dim": 64,
        "d_model": 768,
        "d_ff": 3072,
        "norm": "layernorm",
        "norm_position": "pre",
        "norm_eps": 1e-5,
        "final_norm": True,
        "residual": "sequential",
        "positions": "learned",
        "rope_theta": 10_000.0,
        "rotary_dim": 64,
        "rope_scaling": None,
        "activation": "gelu_tanh",
        "bias": True,
        "qkv_bias": True,
        "qk_norm": False,
        "tied_head": True,
        "head_bias": False,
        "value_embeddings": False,
        "dropout": 0.0,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_json_and_back(family: str) -> None:
    config = tiny_config(**FAMILIES[family])
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(shape=shapes())
def test_any_shape_goes_through_json(shape: dict[str, Any]) -> None:
    config = tiny_config(**shape)
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(("norm_position", "final_norm"), [("pre", True), ("post", False)])
def test_a_configuration_from_before_a_key_means_what_it_meant(
    norm_position: str, final_norm: bool
) -> None:
    """A norm at the end before which there are norms, whole heads that turn, nothing beside."""
    values = tiny_config(positions="rotary", norm_position=norm_position).to_dict()
    for key in ("final_norm", "residual", "rotary_dim", "rope_scaling", "head_bias"):
        del values[key]
    config = GPTConfig.from_dict(values)
    assert config.final_norm is final_norm
    assert (config.residual, config.rotary_dim) == ("sequential", 8)
    assert config.rope_scaling is None
    assert not config.head_bias


def test_the_bundled_checkpoints_shape_is_of_that_kind() -> None:
    path = Path(__file__).parents[3] / "checkpoints" / "python-small" / "config.json"
    config = GPTConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))["model"])
    assert (config.final_norm, config.rotary_dim) == (True, config.head_dim)


def test_a_missing_and_an_unknown_key_are_named() -> None:
    values = tiny_config().to_dict()
    with pytest.raises(ConfigError, match=r"^unknown model keys \['n_embd'\]; .*'d_model'"):
        GPTConfig.from_dict(values | {"n_embd": 32})
    del values["d_ff"], values["bias"]
    with pytest.raises(ConfigError, match=r"^the model configuration lacks \['bias', 'd_ff'\]$"):
        GPTConfig.from_dict(values)


@pytest.mark.parametrize(
    ("key", "wrong", "sentence"),
    [
        ("n_layer", "3", "n_layer is '3'; it must be an integer"),
        ("n_layer", 3.0, "n_layer is 3.0; it must be an integer"),
        ("n_layer", True, "n_layer is True; it must be an integer"),
        ("n_layer", None, "n_layer is None; it must be an integer"),
        ("norm_eps", "1e-5", "norm_eps is '1e-5'; it must be a number"),
        ("dropout", False, "dropout is False; it must be a number"),
        ("bias", 1, "bias is 1; it must be true or false"),
        ("bias", "true", "bias is 'true'; it must be true or false"),
        ("norm", "LayerNorm", "norm is 'LayerNorm'; it must be one of ['layernorm', 'rmsnorm']"),
        ("norm", ["rmsnorm"], "norm is ['rmsnorm']; it must be one of ['layernorm', 'rmsnorm']"),
        ("norm_position", None, "norm_position is None; it must be one of ['pre', 'post']"),
        ("final_norm", "pre", "final_norm is 'pre'; it must be true or false"),
        ("head_bias", None, "head_bias is None; it must be true or false"),
        ("residual", True, "residual is True; it must be one of ['sequential', 'parallel']"),
        ("rotary_dim", 4.0, "rotary_dim is 4.0; it must be an integer"),
        ("rope_scaling", "linear", "rope_scaling is 'linear'; it must be an object or null"),
        ("rope_scaling", {"kind": "linear"}, "rope_scaling lacks ['factor']"),
    ],
)
def test_a_wrong_json_value_is_named(key: str, wrong: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        GPTConfig.from_dict(tiny_config().to_dict() | {key: wrong})


def test_an_integer_is_a_number() -> None:
    """JSON writers drop the fraction of 10000.0."""
    config = GPTConfig.from_dict(tiny_config().to_dict() | {"rope_theta": 10_000, "dropout": 0})
    assert config == tiny_config()


def test_value_embeddings_sit_in_every_second_block_from_the_last() -> None:
    def layers(n_layer: int) -> list[int]:
        config = tiny_config(**MODERN, n_layer=n_layer)
        return [layer for layer in range(n_layer) if config.has_value_embedding(layer)]

    assert layers(1) == [0]
    assert layers(4) == [1, 3]
    assert layers(5) == [0, 2, 4]
    assert not tiny_config().has_value_embedding(2)


def test_padded_rounds_up_to_whole_tiles() -> None:
    assert [padded(size) for size in (1, 64, 65, 50257)] == [64, 64, 128, 50304]
    assert padded(50257, multiple=1) == 50257
