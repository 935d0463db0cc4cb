"""GPT: every shape is compared with its definition, and every family is checked for common
properties.

Whole models are compared with other people's code in `test_against_transformers.py`.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from logitd.model.transformer.attention import CausalAttend
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT, HEAD_ROWS, sinusoidal_table
from logitd.model.transformer.shapes import gpt2_shape
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.plain_stages import plain_stages
from tests.model.shapes import COMBINATIONS, shapes
from tests.profiles import examples

CPU = torch.device("cpu")


@pytest.fixture(params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[request.param]))


# Every shape


@pytest.mark.parametrize("name", COMBINATIONS)
def test_logits_of_every_combination_follow_the_definition(name: str) -> None:
    shape = {"n_layer": 2, "n_kv_head": 2, "head_dim": 16, "d_model": 24, "d_ff": 40}
    gpt = tiny_gpt(tiny_config(**{**COMBINATIONS[name], **shape})).double()
    ids = random_ids(1, 24)
    expected = plain_stages(gpt, ids[0].tolist())["logits"]
    # Relative to their spread: without a norm before the head, logits are large.
    error = (gpt(ids).logits[0] - expected).abs().max() / expected.std()
    assert error < 1e-5


@settings(max_examples=examples(100, fast=30))
@given(shape=shapes())
def test_logits_of_any_shape_follow_the_definition(shape: dict[str, Any]) -> None:
    gpt = tiny_gpt(tiny_config(**shape)).double()
    ids = random_ids(1, 12, vocab_size=gpt.config.vocab_size)
    expected = plain_stages(gpt, ids[0].tolist())["logits"]
    assert_close(gpt(ids).logits[0].double(), expected, atol=1e-5, rtol=1e-5)


# Every family


def test_forward_keeps_only_requested_outputs(gpt: GPT) -> None:
    output = gpt(random_ids(1, 5))
    assert output.hidden_states is None
    assert output.attentions is None


def test_dropout_is_off_in_evaluation(gpt: GPT) -> None:
    with_dropout = tiny_gpt(GPTConfig.from_dict(gpt.config.to_dict() | {"dropout": 0.5}))
    ids = random_ids(2, 9)
    assert torch.equal(with_dropout(ids).logits, gpt(ids).logits)
    with_dropout.train()
    assert not torch.allclose(with_dropout(ids).logits, gpt(ids).logits, atol=1e-2)


def test_bfloat16_stays_near_float32(gpt: GPT) -> None:
    ids = random_ids(2, 9)
    exact = gpt(ids).logits
    rounded = gpt.to(torch.bfloat16)(ids, hidden_states=True, attentions=True)
    assert rounded.logits.dtype == torch.float32, "rounded logits of likely tokens would be equal"
    assert rounded.hidden_states.dtype == torch.bfloat16
    error = (rounded.logits - exact).std() / exact.std()
    assert error < 0.2


def test_narrow_head_is_widened_piece_by_piece() -> None:
    """The result equals a single product, even at the ends of the pieces and of the vocabulary."""
    gpt = tiny_gpt(tiny_config(vocab_size=2 * HEAD_ROWS + 7)).to(torch.bfloat16).eval()
    hidden = torch.randn(3, 5, gpt.config.d_model).to(torch.bfloat16)
    weight = gpt.token_embedding.weight if gpt.config.tied_head else gpt.head.weight
    expected = hidden.double() @ weight[: gpt.config.vocab_size].double().T
    assert_close(gpt.logits(hidden).double(), expected, rtol=1e-5, atol=1e-5)


# Positions


def test_sinusoids_are_the_published_formula() -> None:
    for d_model in (8, 7):
        table = sinusoidal_table(50, d_model, CPU)
        assert table.dtype == torch.float32
        expected = [
            [
                (math.sin, math.cos)[channel % 2](
                    position / 10_000 ** ((channel - channel % 2) / d_model)
                )
                for channel in range(d_model)
            ]
            for position in range(50)
        ]
        assert_close(table, torch.tensor(expected), atol=1e-6, rtol=0)


# Block and head


def test_tied_head_counts_once() -> None:
    tied, untied = tiny_gpt(tiny_config()), tiny_gpt(tiny_config(tied_head=False))
    rows = tied.config.padded_vocab_size
    assert rows == 320
    assert untied.parameter_count() - tied.parameter_count() == rows * tied.config.d_model
    assert "head.weight" not in tied.state_dict()
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    assert_close(tied.logits(x), x @ tied.token_embedding.weight[:257].T)
    assert_close(untied.logits(x), x @ untied.head.weight[:257].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_bias", [True, False])
@pytest.mark.parametrize("tied_head", [True, False])
def test_padded_ids_are_cut_off(tied_head: bool, head_bias: bool, dtype: torch.dtype) -> None:
    gpt = tiny_gpt(tiny_config(tied_head=tied_head, head_bias=head_bias)).to(dtype)
    ids = random_ids(2, 9)
    before = gpt(ids).logits
    assert before.shape[-1] == 257
    matrix, bias = gpt.head_parameters()
    assert (bias is not None) == head_bias
    for rows in (matrix, bias):
        if rows is not None:
            rows[257:] = 1e6
    assert torch.equal(gpt(ids).logits, before)


# Training


def test_dropout_in_training_acts_on_the_embeddings() -> None:
    gpt = tiny_gpt(tiny_config(dropout=0.25)).train()
    ids = random_ids(4, 100)
    embedded = gpt.token_embedding(ids) + gpt.position_embedding.weight[:100]
    torch.manual_seed(0)
    dropped = gpt(ids, hidden_states=True).hidden_states[0]
    zero = dropped == 0
    assert_close(dropped, torch.where(zero, 0, embedded / 0.75))
    assert 0.22 < zero.float().mean().item() < 0.28


def test_dropout_in_training_acts_on_both_residual_branches() -> None:
    gpt = tiny_gpt(tiny_config(dropout=0.5)).train()
    x = torch.randn(4, 100, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    after = gpt.blocks[0](x, random_ids(4, 100), None, CausalAttend())
    untouched = (after == x).float().mean().item()  # both branches dropped: one in four
    assert 0.22 < untouched < 0.28


def test_initial_weights_are_gpt2s() -> None:
    torch.manual_seed(0)
    gpt = GPT(gpt2_shape(vocab_size=300, context_length=64, n_layer=8, n_head=4, d_model=128))
    for name, parameter in gpt.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            into_the_stream = name.endswith(("attention_out.weight", "mlp_down.weight"))
            std = 0.02 / 4 if into_the_stream else 0.02  # 4 = sqrt(2 * 8 layers)
            assert abs(parameter.std().item() / std - 1) < 0.05, name


def test_position_tables_are_not_weights() -> None:
    for family in ("original", "llama"):
        names = tiny_gpt(tiny_config(**FAMILIES[family])).state_dict()
        assert not [name for name in names if "rope" in name or "sinusoid" in name]
