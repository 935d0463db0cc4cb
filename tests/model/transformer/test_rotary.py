"""Rotary positions: tables of scaled angles and of partly rotated heads."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close

from logitd.model.transformer.config import ConfigError, RopeScaling
from logitd.model.transformer.rotary import angles_per_position, rotary_tables, rotate
from tests.model.factories import tiny_config
from tests.model.shapes import SCALINGS

CPU = torch.device("cpu")

LLAMA_31 = {
    "kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_context_length": 8192,
}  # fmt: skip
YARN = {"kind": "yarn", "factor": 4.0, "original_context_length": 32_768}


@pytest.mark.parametrize(
    "scaling",
    [
        *(scaling for scaling in SCALINGS.values() if scaling is not None),
        LLAMA_31,
        YARN,
        {**YARN, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
        {**YARN, "attention_factor": 0.75},
        {**YARN, "factor": 0.5},
        {"kind": "yarn", "factor": 8.0, "original_context_length": 6},
    ],
)
@pytest.mark.parametrize(("head_dim", "turning"), [(8, 8), (64, 64), (128, 32), (80, 20)])
def test_angles_equal_the_angles_of_transformers(
    scaling: Mapping[str, Any], head_dim: int, turning: int
) -> None:
    """Fully rotated heads have the same angles as Llama's; partially rotated heads have the same
    angles as GPT-NeoX's."""
    parameters = {
        **scaling,
        "rope_type": scaling["kind"],
        "rope_theta": 500_000.0,
        "original_max_position_embeddings": scaling.get("original_context_length"),
    }
    if turning != head_dim:
        parameters["partial_rotary_factor"] = turning / head_dim
    make: Any = transformers.LlamaConfig if turning == head_dim else transformers.GPTNeoXConfig
    theirs = make(
        rope_parameters=parameters, num_attention_heads=4, hidden_size=4 * head_dim,
        head_dim=head_dim,
    )  # fmt: skip
    expected, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["kind"]](theirs)
    config = tiny_config(
        positions="rotary", head_dim=head_dim, rotary_dim=turning, rope_theta=500_000.0,
        rope_scaling=scaling,
    )  # fmt: skip
    angles = angles_per_position(config, CPU)
    assert_close(angles.float(), expected, rtol=1e-6, atol=0)
    cos, sin = rotary_tables(config, CPU)
    positions = torch.arange(config.context_length)[:, None]
    turned = turning // 2
    assert_close(cos[:, :turned], factor * (positions * angles).cos().float())
    assert_close(sin[:, :turned], factor * (positions * angles).sin().float())


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotation_keeps_the_other_channels(kind: str) -> None:
    config = tiny_config(positions="rotary", head_dim=16, rotary_dim=6, rope_scaling=SCALINGS[kind])
    cos, sin = rotary_tables(config, CPU)
    assert cos.shape == sin.shape == (128, 8)
    assert (cos[:, 3:] == 1).all()
    assert (sin[:, 3:] == 0).all()
    x = torch.randn(2, 3, 128, 16, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, cos[None, None], sin[None, None])
    still = [*range(3, 8), *range(11, 16)]
    assert torch.equal(turned[..., still], x[..., still])
    moved = (turned[..., 1:, [0, 1, 2, 8, 9, 10]] != x[..., 1:, [0, 1, 2, 8, 9, 10]]).float()
    assert moved.mean() > 0.99


def test_unscaled_tables_keep_their_bits() -> None:
    """The tables are cos and sin of position * theta^(-2i / D), computed in float64."""
    config = tiny_config(positions="rotary", head_dim=12, rope_theta=700.0)
    exponents = torch.arange(0, 12, 2, dtype=torch.float64) / 12
    angles = torch.arange(128)[:, None] * 700.0**-exponents
    cos, sin = rotary_tables(config, CPU)
    assert torch.equal(cos, angles.cos().float())
    assert torch.equal(sin, angles.sin().float())


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaling_round_trips_through_json(kind: str) -> None:
    values = SCALINGS[kind]
    if values is None:
        return
    scaling = RopeScaling.from_dict(values)
    assert RopeScaling.from_dict(scaling.to_dict()) == scaling
    assert set(values) <= set(scaling.to_dict())
    assert None not in scaling.to_dict().values()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "linear"}, "factor"),
        ({"factor": 2.0}, "kind"),
        ({"kind": "dynamic", "factor": 2.0}, "kind.*dynamic.*linear.*llama3.*yarn"),
        ({"kind": "linear", "factor": "2"}, "factor.*'2'.*number"),
        ({"kind": "linear", "factor": True}, "factor.*True.*number"),
        ({"kind": "linear", "factor": 0.0}, r"factor.*0\.0.*0\.000001"),
        ({"kind": "yarn", "factor": math.inf, "original_context_length": 9}, "factor.*inf"),
        ({"kind": "linear", "factor": 2.0, "beta_fast": 32.0}, r"beta_fast.*32\.0.*linear"),
        ({"kind": "yarn", "factor": 2.0}, "original_context_length.*yarn"),
        ({**LLAMA_31, "original_context_length": 8192.0}, "original_context_length.*8192.*integer"),
        ({**LLAMA_31, "high_freq_factor": 1.0}, r"low_freq_factor.*1\.0.*high_freq_factor.*1\.0"),
        ({**YARN, "beta_fast": 1.0, "beta_slow": 32.0}, r"beta_slow.*32\.0.*beta_fast.*1\.0"),
        ({**YARN, "truncate": 1}, "truncate.*1.*boolean"),
        ({"kind": "linear", "factor": 2.0, "mscale": 1.0}, "mscale.*'attention_factor'"),
    ],
)
def test_scaling_names_a_wrong_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"rope_scaling.*{message}"):
        RopeScaling.from_dict(values)
