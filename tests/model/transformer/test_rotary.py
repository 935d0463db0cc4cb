"""Rotary positions: tables of scaled angles and of heads of which a part turns."""

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
def test_angles_are_those_of_transformers(
    scaling: Mapping[str, Any], head_dim: int, turning: int
) -> None:
    """Of Llama with whole heads, of GPT-NeoX with a part of each."""
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
def test_channels_that_do_not_turn_come_out_as_they_went_in(kind: str) -> None:
    """To the bit, whatever is multiplied onto the others."""
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


def test_a_part_of_a_head_is_turned_as_gpt_neox_turns_it() -> None:
    """There the first R channels are halves of their own: in the order that an import brings them
    into, scores are the same."""
    head_dim, turning, length = 10, 4, 20
    config = tiny_config(
        positions="rotary", head_dim=head_dim, rotary_dim=turning, context_length=length
    )
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, length, head_dim, generator=generator)
    angles = torch.arange(length)[:, None] * 10_000.0 ** -(torch.arange(0, 4, 2) / 4)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=1) for f in (torch.cos, torch.sin))

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, rest = x[..., :turning], x[..., turning:]
        half = torch.cat((-first[..., 2:], first[..., :2]), dim=-1)
        return torch.cat((first * cos + half * sin, rest), dim=-1)

    order = [0, 1, 4, 5, 6, 2, 3, 7, 8, 9]
    tables = [table[None, None] for table in rotary_tables(config, CPU)]
    ours = [rotate(x[..., order], *tables) for x in (q, k)]
    assert_close(ours[0] @ ours[1].mT, turned(q) @ turned(k).mT, atol=1e-5, rtol=1e-5)


def test_tables_without_scaling_are_what_they_always_were() -> None:
    """The bits of cos and sin of position * theta^(-2i / D) in float64."""
    config = tiny_config(positions="rotary", head_dim=12, rope_theta=700.0)
    exponents = torch.arange(0, 12, 2, dtype=torch.float64) / 12
    angles = torch.arange(128)[:, None] * 700.0**-exponents
    cos, sin = rotary_tables(config, CPU)
    assert torch.equal(cos, angles.cos().float())
    assert torch.equal(sin, angles.sin().float())


def test_yarns_defaults_are_the_papers() -> None:
    scaling = RopeScaling(kind="yarn", factor=16.0, original_context_length=4096)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, True)
    assert scaling.attention_factor == 0.1 * math.log(16) + 1
    assert RopeScaling(
        kind="yarn", factor=1.0, original_context_length=9
    ).attention_factor == 1.0  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaling_goes_through_json(kind: str) -> None:
    values = SCALINGS[kind]
    if values is None:
        return
    scaling = RopeScaling.from_dict(values)
    assert RopeScaling.from_dict(scaling.to_dict()) == scaling
    assert set(values) <= set(scaling.to_dict())
    assert None not in scaling.to_dict().values()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"kind": "linear"}, "rope_scaling lacks ['factor']"),
        ({"factor": 2.0}, "rope_scaling lacks ['kind']"),
        (
            {"kind": "dynamic", "factor": 2.0},
            "rope_scaling.kind is 'dynamic'; it must be one of ['linear', 'llama3', 'yarn']",
        ),
        ({"kind": "linear", "factor": "2"}, "rope_scaling.factor is '2'; it must be a number"),
        ({"kind": "linear", "factor": True}, "rope_scaling.factor is True; it must be a number"),
        (
            {"kind": "linear", "factor": 0.0},
            "rope_scaling.factor is 0.0; it must be from 1e-06 to 1e+12",
        ),
        (
            {"kind": "yarn", "factor": math.inf, "original_context_length": 9},
            "rope_scaling.factor is inf; it must be from 1e-06 to 1e+12",
        ),
        (
            {"kind": "linear", "factor": 2.0, "beta_fast": 32.0},
            "rope_scaling.beta_fast is 32.0: the kind 'linear' has kind, factor",
        ),
        (
            {"kind": "yarn", "factor": 2.0},
            "rope_scaling lacks original_context_length, which the kind 'yarn' needs",
        ),
        (
            {**LLAMA_31, "original_context_length": 8192.0},
            "rope_scaling.original_context_length is 8192.0; it must be an integer",
        ),
        (
            {**LLAMA_31, "high_freq_factor": 1.0},
            "rope_scaling.low_freq_factor is 1.0 and high_freq_factor 1.0; the former must be "
            "below the latter",
        ),
        (
            {**YARN, "beta_fast": 1.0, "beta_slow": 32.0},
            "rope_scaling.beta_slow is 32.0 and beta_fast 1.0; the former must be below the latter",
        ),
        ({**YARN, "truncate": 1}, "rope_scaling.truncate is 1; it must be true or false"),
        (
            {"kind": "linear", "factor": 2.0, "mscale": 1.0},
            "unknown rope_scaling keys ['mscale']; known are ['attention_factor', 'beta_fast', "
            "'beta_slow', 'factor', 'high_freq_factor', 'kind', 'low_freq_factor', "
            "'original_context_length', 'truncate']",
        ),
    ],
)
def test_wrong_scaling_is_named(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RopeScaling.from_dict(values)
    assert str(raised.value) == sentence
