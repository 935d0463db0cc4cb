"""GPTConfig: shapes that it refuses, with the field and the numbers, and its JSON form."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from logitd.model.transformer.config import WITHOUT_PARTS, ConfigError, GPTConfig, parts_of
from logitd.model.transformer.shapes import MODERN, padded
from tests.model.factories import tiny_config
from tests.model.shapes import shapes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(
            ({field: value}, rf"{field}\b.*{value}")
            for field, value in (
                ("vocab_size", 0), ("context_length", -1), ("n_layer", 0), ("n_kv_head", 0),
                ("head_dim", 0), ("d_ff", 0), ("dropout", 1.0), ("dropout", -0.1),
                ("dropout", math.nan), ("norm_eps", 0.0), ("norm_eps", math.nan),
            )
        ),
        ({"padded_vocab_size": 256}, "padded_vocab_size.*256.*vocab_size.*257"),
        ({"d_model": 30}, "d_model.*30.*n_head.*4.*head_dim"),
        ({"n_head": 0}, "d_model.*32.*n_head.*0"),
        ({"n_kv_head": 3}, "n_head.*4.*n_kv_head.*3"),
        ({"positions": "rotary", "head_dim": 7}, "head_dim.*7"),
        ({"positions": "rotary", "rope_theta": 1.0}, r"rope_theta.*1\.0"),
        ({"norm_position": "post", "residual": "parallel"}, "residual.*parallel.*post.*'pre'"),
        *(
            ({"positions": "rotary", "rotary_dim": wrong}, f"rotary_dim.*{wrong}.*2.*head_dim.*8")
            for wrong in (3, 10)
        ),
        ({"positions": "rotary", "rotary_dim": 0}, "rotary_dim.*0.*2"),
        ({"rotary_dim": 4}, "rotary_dim.*4.*learned.*8"),
        (
            {"positions": "sinusoidal", "rope_scaling": {"kind": "linear", "factor": 2.0}},
            r"rope_scaling.*linear.*2\.0.*sinusoidal.*None",
        ),
        ({"windows": (7,), "n_layer": 1, "logit_softcap": 0.0}, r"logit_softcap.*0\.0.*greater"),
        ({"windows": (7, 0, None)}, r"windows.*7, 0, None.*greater than or equal to 1"),
    ],
)  # fmt: skip
def test_config_refuses_an_impossible_shape(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**overrides)


def test_rotary_rules_apply_to_rotary_positions_alone() -> None:
    assert tiny_config(positions="learned", head_dim=7, rope_theta=1.0).head_dim == 7


def test_given_head_dim_frees_the_width() -> None:
    config = tiny_config(d_model=30, n_head=4, n_kv_head=2, head_dim=6)
    assert config.qkv_width == (4 + 2 + 2) * 6
    assert config.kv_width == 2 * 6


@given(shape=shapes())
def test_config_round_trips_through_json(shape: dict[str, Any]) -> None:
    config = tiny_config(**shape)
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(("norm_position", "final_norm"), [("pre", True), ("post", False)])
def test_config_without_later_keys_keeps_its_meaning(norm_position: str, final_norm: bool) -> None:
    """Without these keys, there is a final norm only if norms precede their sublayers, all channels
    of a head are rotated, and there is no scaling and no head bias."""
    values = tiny_config(positions="rotary", norm_position=norm_position).to_dict()
    for key in ("final_norm", "residual", "rotary_dim", "rope_scaling", "head_bias"):
        del values[key]
    for key in WITHOUT_PARTS:
        del values[key]
    config = GPTConfig.from_dict(values)
    assert config.final_norm is final_norm
    assert (config.residual, config.rotary_dim) == ("sequential", 8)
    assert config.rope_scaling is None
    assert not config.head_bias
    assert parts_of(config) == {}


def test_windows_as_wide_as_the_context_are_removed() -> None:
    config = tiny_config(windows=(128, 127, None))
    assert [config.window(layer) for layer in range(3)] == [None, 127, None]
    assert parts_of(config) == {"windows": (128, 127, None)}
    assert parts_of(tiny_config(windows=(128, 999, None))) == {}


def test_windows_are_one_for_each_block() -> None:
    values = tiny_config().to_dict()
    with pytest.raises(ConfigError, match=r"windows.*2.*n_layer.*3"):
        GPTConfig.from_dict(values | {"windows": [64, None]})
    read = GPTConfig.from_dict(values | {"windows": ["64", "all", None]})
    assert read.windows == (64, None, None)


def test_bundled_checkpoint_has_such_a_config() -> None:
    path = Path(__file__).parents[3] / "checkpoints" / "python-small" / "config.json"
    config = GPTConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))["model"])
    assert (config.final_norm, config.rotary_dim) == (True, config.head_dim)


def test_config_names_missing_and_unknown_keys() -> None:
    values = tiny_config().to_dict()
    with pytest.raises(ConfigError, match=r"n_embd.*'d_model'"):
        GPTConfig.from_dict(values | {"n_embd": 32})
    del values["d_ff"], values["bias"]
    with pytest.raises(ConfigError, match=r"bias.*d_ff"):
        GPTConfig.from_dict(values)


@pytest.mark.parametrize(
    ("key", "wrong", "expected"),
    [
        *(("n_layer", wrong, "integer") for wrong in ("3", 3.0, True, None)),
        ("norm_eps", "1e-5", "number"),
        ("dropout", False, "number"),
        ("bias", 1, "boolean"),
        ("bias", "true", "boolean"),
        ("norm", "LayerNorm", "layernorm.*rmsnorm"),
        ("norm", ["rmsnorm"], "layernorm.*rmsnorm"),
        ("norm_position", None, "pre.*post"),
        ("final_norm", "pre", "boolean"),
        ("head_bias", None, "boolean"),
        ("residual", True, "sequential.*parallel"),
        ("rotary_dim", 4.0, "integer"),
        ("rope_scaling", "linear", "object or null"),
        ("windows", 64, "tuple"),
        ("smear", 1, "boolean"),
    ],
)
def test_config_names_a_wrong_json_value(key: str, wrong: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*{re.escape(repr(wrong))}.*{expected}"):
        GPTConfig.from_dict(tiny_config().to_dict() | {key: wrong})


def test_config_takes_an_integer_for_a_number() -> None:
    """Some JSON writers write 10000.0 as 10000."""
    config = GPTConfig.from_dict(tiny_config().to_dict() | {"rope_theta": 10_000, "dropout": 0})
    assert config == tiny_config()


def test_value_embeddings_sit_in_every_second_block_from_the_last_or_in_all() -> None:
    def layers(n_layer: int, value_embeddings: bool | str = True) -> list[int]:
        shape = {**MODERN, "value_embeddings": value_embeddings, "n_layer": n_layer}
        config = tiny_config(**shape)
        return [layer for layer in range(n_layer) if config.has_value_embedding(layer)]

    assert layers(1) == [0]
    assert layers(4) == [1, 3]
    assert layers(5) == [0, 2, 4]
    assert layers(4, "all") == [0, 1, 2, 3]
    assert layers(4, value_embeddings=False) == []
    with pytest.raises(ConfigError, match="value_embeddings is 'every'"):
        layers(4, "every")
    assert not tiny_config().has_value_embedding(2)


def test_padded_rounds_up_to_whole_tiles() -> None:
    assert [padded(size) for size in (1, 64, 65, 50257)] == [64, 64, 128, 50304]
    assert padded(50257, multiple=1) == 50257
