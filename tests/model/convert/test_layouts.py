"""Layouts of weights: weights that are written and read again are unchanged, and rows and channels
are in the documented order."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.convert import layouts
from logitd.model.convert.foreign import ConvertError, StateDictReader
from logitd.model.convert.layouts import (
    Layout,
    read_weights,
    tie_if_equal,
    turning_first,
    write_weights,
)
from logitd.model.transformer.shapes import MODERN
from tests.model.factories import tiny_config, tiny_gpt

ROTARY = {"positions": "rotary", "tied_head": False}
GROUPED = {**MODERN, "value_embeddings": False, "n_kv_head": 2, "qk_norm": True}


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (layouts.GPT2, {}),
        (layouts.NANOGPT, {"bias": False, "qkv_bias": False}),
        (layouts.NEOX, {**ROTARY, "rotary_dim": 4}),
        (layouts.LLAMA, GROUPED),
        (layouts.LITGPT, {**ROTARY, "rotary_dim": 4, "n_kv_head": 2, "qk_norm": True}),
        (replace(layouts.LLAMA, channels=layouts.evens_first), GROUPED),
    ],
)
def test_written_weights_are_read_unchanged(layout: Layout, changes: dict[str, Any]) -> None:
    gpt = tiny_gpt(tiny_config(**changes))
    written = write_weights(gpt, layout, biased=())
    reader = StateDictReader("theirs", written)
    read = read_weights(reader, gpt.config, layout)
    reader.finish()
    rows = gpt.config.vocab_size
    expected = {
        name: tensor[:rows] if name.partition(".")[0] in ("token_embedding", "head") else tensor
        for name, tensor in gpt.state_dict().items()
    }
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)


def test_parts_without_biases_get_zeros() -> None:
    gpt = tiny_gpt(tiny_config(bias=False, qkv_bias=False))
    written = write_weights(gpt, layouts.GPT2, biased={"mlp_up"})
    biases = {name: tensor for name, tensor in written.items() if "c_" in name and "bias" in name}
    assert set(biases) == {f"transformer.h.{i}.mlp.c_fc.bias" for i in range(gpt.config.n_layer)}
    assert not any(bias.any() for bias in biases.values())
    reader = StateDictReader("theirs", written)
    config = tiny_config(qkv_bias=False)
    unbiased = {"attention_out", "mlp_down", *layouts.NORMS}
    read = read_weights(reader, config, layouts.GPT2, unbiased=unbiased)
    biases = {name: tensor for name, tensor in read.items() if "bias" in name}
    assert len(biases) == 1 + 5 * config.n_layer
    assert not any(bias.any() for bias in biases.values())


def test_head_is_tied_if_it_equals_the_embedding() -> None:
    gpt = tiny_gpt(tiny_config(tied_head=False))
    weights = gpt.state_dict()
    assert tie_if_equal(gpt.config, weights) == (gpt.config, weights)
    config, rest = tie_if_equal(
        gpt.config, {**weights, "head.weight": weights["token_embedding.weight"].clone()}
    )
    assert config.tied_head
    assert "head.weight" not in rest


def test_more_layers_than_tensors_are_refused() -> None:
    reader = StateDictReader("theirs", {"a": torch.ones(1)})
    with pytest.raises(ConvertError, match=r"theirs.* 1 tensors.*1,000,000"):
        read_weights(reader, tiny_config(n_layer=1_000_000), layouts.GPT2)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
def test_channels_that_turn_lead_each_half(pairs: tuple[int, int]) -> None:
    turning, half = pairs
    config = tiny_config(positions="rotary", head_dim=2 * half, rotary_dim=2 * turning)
    order = turning_first(config)
    assert sorted(order) == [*range(2 * half)]
    assert order[:turning] == [*range(turning)]
    assert order[half : half + turning] == [*range(turning, 2 * turning)]
    resting = order[turning:half] + order[half + turning :]
    assert resting == [*range(2 * turning, 2 * half)]


def test_fused_heads_are_separated() -> None:
    """The fused rows are ordered by head: six channels each of query, key and value."""
    config = tiny_config(positions="rotary", n_head=2, d_model=12, rotary_dim=2)
    order = [0, 2, 3, 1, 4, 5]
    assert layouts.NEOX.rows(config)["qkv"].tolist() == [
        18 * head + 6 * part + channel
        for part in range(3)
        for head in range(2)
        for channel in (range(6) if part == 2 else order)
    ]


def test_neighbors_are_the_halves_of_a_head() -> None:
    config = tiny_config(positions="rotary", n_head=2, d_model=12)
    theirs = layouts.LLAMA2C.rows(config)["qkv"].argsort().tolist()
    assert theirs[:12] == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert theirs[24:] == [*range(24, 36)]
