"""GPT: the rules that every family keeps, and each part against its formula.

Whole models against other people's code are in `test_against_transformers.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from torch.testing import assert_close

from logitd.model.transformer.attention import CausalAttend, RecordingAttend
from logitd.model.transformer.config import MODERN, ORIGINAL, GPTConfig, gpt2_shape
from logitd.model.transformer.gpt import GPT, HEAD_ROWS, Block, sinusoidal_table
from logitd.model.transformer.rotary import rotary_tables, rotate
from tests.model import by_definition
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.shapes import COMBINATIONS, shapes

CPU = torch.device("cpu")


@pytest.fixture(params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[request.param]))


# Every shape


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_combination_is_what_its_definition_says(name: str) -> None:
    shape = {"n_layer": 2, "n_kv_head": 2, "head_dim": 16, "d_model": 24, "d_ff": 40}
    gpt = tiny_gpt(tiny_config(**{**COMBINATIONS[name], **shape})).double()
    ids = random_ids(1, 24)
    expected = by_definition.logits(gpt.config.to_dict(), gpt.state_dict(), ids[0].tolist())
    # In float64 but for the tables, as a share: without a norm before the head logits are large.
    error = (gpt(ids).logits[0] - expected).abs().max() / expected.std()
    assert error < 1e-5


@given(shape=shapes())
def test_any_shape_is_what_its_definition_says(shape: dict[str, Any]) -> None:
    gpt = tiny_gpt(tiny_config(**shape))
    ids = random_ids(1, 12, vocab_size=gpt.config.vocab_size)
    expected = by_definition.logits(gpt.config.to_dict(), gpt.state_dict(), ids[0].tolist())
    assert_close(gpt(ids).logits[0].double(), expected, atol=1e-3, rtol=1e-3)


# Every family


def test_shapes(gpt: GPT) -> None:
    output = gpt(random_ids(2, 9), hidden_states=True, attentions=True)
    config = gpt.config
    assert output.logits.shape == (2, 9, config.vocab_size)
    assert output.hidden_states.shape == (config.n_layer + 1, 2, 9, config.d_model)
    assert output.attentions.shape == (config.n_layer, 2, config.n_head, 9, 9)


def test_nothing_is_kept_that_was_not_asked_for(gpt: GPT) -> None:
    output = gpt(random_ids(1, 5))
    assert output.hidden_states is None
    assert output.attentions is None


def test_one_position_up_to_a_full_context(gpt: GPT) -> None:
    ids = random_ids(1, gpt.config.context_length)
    full = gpt(ids).logits
    assert full.isfinite().all()
    assert_close(gpt(ids[:, :1]).logits, full[:, :1], atol=1e-4, rtol=1e-4)


def test_a_later_token_changes_no_earlier_logits(gpt: GPT) -> None:
    ids = random_ids(2, 12)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % gpt.config.vocab_size
    before, after = gpt(ids).logits, gpt(changed).logits
    assert torch.equal(before[:, :7], after[:, :7])
    for position in range(7, 12):  # ... while it reaches every one from its own on
        assert not torch.allclose(before[:, position], after[:, position], atol=1e-3)


def test_padding_changes_nothing(gpt: GPT) -> None:
    lengths = torch.tensor([3, 11, 1, 8])
    ids = random_ids(4, 11)
    batch = gpt(ids, lengths=lengths, hidden_states=True, attentions=True)
    for row, length in enumerate(lengths.tolist()):
        alone = gpt(ids[row : row + 1, :length], hidden_states=True, attentions=True)
        assert_close(batch.logits[row, :length], alone.logits[0], atol=1e-4, rtol=1e-4)
        assert_close(
            batch.hidden_states[:, row, :length], alone.hidden_states[:, 0], atol=1e-4, rtol=1e-4
        )
        assert_close(
            batch.attentions[:, row, :, :length, :length],
            alone.attentions[:, 0],
            atol=1e-4,
            rtol=1e-4,
        )


def test_the_padding_itself_is_never_seen(gpt: GPT) -> None:
    """Whichever id pads, what comes back is the same to the last bit, and zero where it padded."""
    lengths = torch.tensor([3, 11, 1, 8])
    padding = torch.arange(11) >= lengths[:, None]
    ids = random_ids(4, 11)
    first, second = (
        gpt(ids.masked_fill(padding, pad), lengths=lengths, hidden_states=True, attentions=True)
        for pad in (0, gpt.config.vocab_size - 1)
    )
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.hidden_states, second.hidden_states)
    assert torch.equal(first.attentions, second.attentions)
    assert (first.logits[padding] == 0).all()
    assert (first.hidden_states[:, padding] == 0).all()
    assert (first.attentions.transpose(2, 3)[:, padding] == 0).all()


def test_hidden_states_are_the_stream_between_the_blocks(gpt: GPT) -> None:
    ids = random_ids(2, 9)
    positions = torch.arange(9).expand(2, 9)
    output = gpt(ids, hidden_states=True)
    embedded = gpt.token_embedding(ids)
    if gpt.config.positions == "learned":
        embedded = embedded + gpt.position_embedding.weight[:9]
    elif gpt.config.positions == "sinusoidal":
        embedded = embedded + sinusoidal_table(9, gpt.config.d_model, CPU)
    assert_close(output.hidden_states[0], embedded)
    rotation = None
    if gpt.config.positions == "rotary":
        cos, sin = rotary_tables(gpt.config, CPU)
        rotation = (cos[positions][:, None], sin[positions][:, None])  # (B, 1, T, D / 2)
    for layer, block in enumerate(gpt.blocks):
        after = block(output.hidden_states[layer], ids, rotation, CausalAttend())
        assert_close(output.hidden_states[layer + 1], after)
    last = output.hidden_states[-1]
    if gpt.config.final_norm:
        last = gpt.final_norm(last)
    assert_close(output.logits, gpt.logits(last))


def test_recording_attention_changes_nothing(gpt: GPT) -> None:
    """The fused kernel and the one spelled out agree, and the rows are causal distributions."""
    ids = random_ids(2, 9)
    fused = gpt(ids)
    recorded = gpt(ids, attentions=True)
    assert_close(recorded.logits, fused.logits, atol=1e-4, rtol=1e-4)
    assert_close(recorded.attentions.sum(dim=-1), torch.ones(3, 2, 4, 9))
    ahead = torch.ones(9, 9, dtype=torch.bool).triu(1)
    assert (recorded.attentions[..., ahead] == 0).all()
    assert (recorded.attentions[..., 0, 0] == 1).all()


def test_every_parameter_is_used(gpt: GPT) -> None:
    """A weight that the forward forgets gets no gradient."""
    gpt.requires_grad_(True)
    ids = random_ids(2, 10)
    logits = gpt(ids[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    names, parameters = zip(*gpt.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        assert gradient.abs().max() > 1e-6, name


def test_dropout_does_nothing_in_evaluation(gpt: GPT) -> None:
    with_dropout = tiny_gpt(GPTConfig.from_dict(gpt.config.to_dict() | {"dropout": 0.5}))
    ids = random_ids(2, 9)
    assert torch.equal(with_dropout(ids).logits, gpt(ids).logits)
    with_dropout.train()
    assert not torch.allclose(with_dropout(ids).logits, gpt(ids).logits, atol=1e-2)


def test_bfloat16_stays_near_float32(gpt: GPT) -> None:
    ids = random_ids(2, 9)
    exact = gpt(ids).logits
    rounded = gpt.to(torch.bfloat16)(ids, hidden_states=True, attentions=True)
    assert rounded.logits.dtype == torch.float32, "rounded, likely tokens would be equals"
    assert rounded.hidden_states.dtype == torch.bfloat16
    error = (rounded.logits - exact).std() / exact.std()
    assert error < 0.2


def test_a_narrow_head_is_widened_piece_by_piece() -> None:
    """Ends of pieces, and padded ids, are where they would be in one product."""
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


def test_rotation_turns_pairs_as_complex_numbers() -> None:
    """Channels i and i + D / 2 are one complex number, turned by position * theta^(-2i / D)."""
    theta, head_dim = 500.0, 6
    x = torch.randn(1, 2, 40, head_dim, generator=torch.Generator().manual_seed(0))
    config = tiny_config(positions="rotary", context_length=40, head_dim=head_dim, rope_theta=theta)
    cos, sin = rotary_tables(config, CPU)
    assert cos.dtype == sin.dtype == torch.float32
    turned = rotate(x, cos[None, None], sin[None, None])
    number = torch.complex(x[..., :3].double(), x[..., 3:].double())
    angle = torch.tensor(
        [[position / theta ** (2 * i / head_dim) for i in range(3)] for position in range(40)],
        dtype=torch.float64,
    )
    number = number * torch.polar(torch.ones_like(angle), angle)
    assert_close(turned, torch.cat((number.real, number.imag), dim=-1).float())


def shifted(gpt: GPT, ids: Tensor, shift: int) -> Tensor:
    """Logits of the tokens at positions shift, shift + 1, ..."""
    positions = torch.arange(ids.shape[1]) + shift
    x = gpt.transform(ids, positions.expand_as(ids), CausalAttend())
    return gpt.logits(x)


@pytest.mark.parametrize("family", FAMILIES)
def test_explicit_positions(family: str) -> None:
    """Rotary positions tell distances alone; learned and sinusoidal ones tell where a token is."""
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    ids = random_ids(2, 9)
    assert_close(shifted(gpt, ids, 0), gpt(ids).logits)
    moved = shifted(gpt, ids, 100)
    if gpt.config.positions == "rotary":
        assert_close(moved, gpt(ids).logits, atol=1e-3, rtol=1e-3)
    else:
        assert not torch.allclose(moved, gpt(ids).logits, atol=1e-1)


def test_each_row_has_positions_of_its_own() -> None:
    gpt = tiny_gpt()
    ids = random_ids(2, 9)
    positions = torch.stack((torch.arange(9), torch.arange(9) + 50))
    logits = gpt.logits(gpt.transform(ids, positions, CausalAttend()))
    assert_close(logits[0], shifted(gpt, ids, 0)[0])
    assert_close(logits[1], shifted(gpt, ids, 50)[1])


@pytest.mark.parametrize("family", ["gpt2", "modern"])
def test_the_order_of_tokens_matters(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    ids = random_ids(1, 9)
    swapped = ids[:, [1, 0, *range(2, 9)]]
    assert not torch.allclose(gpt(ids).logits[:, -1], gpt(swapped).logits[:, -1], atol=1e-3)


# Block and head


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_block_is_torchs_own_transformer_layer(norm_position: str, activation: str) -> None:
    config = tiny_config(**{**ORIGINAL, "norm_position": norm_position, "activation": activation})
    block = tiny_gpt(config).blocks[1]
    theirs = nn.TransformerEncoderLayer(
        config.d_model,
        config.n_head,
        config.d_ff,
        dropout=0.0,
        activation=activation,
        batch_first=True,
        norm_first=norm_position == "pre",
    )
    names = {
        "qkv.weight": "self_attn.in_proj_weight",
        "qkv.bias": "self_attn.in_proj_bias",
        "attention_out": "self_attn.out_proj",
        "attention_norm": "norm1",
        "mlp_up": "linear1",
        "mlp_down": "linear2",
        "mlp_norm": "norm2",
    }

    def renamed(name: str) -> str:
        module, _, tensor = name.partition(".")
        return names.get(name) or f"{names[module]}.{tensor}"

    theirs.load_state_dict({renamed(name): value for name, value in block.state_dict().items()})
    x = torch.randn(2, 9, config.d_model, generator=torch.Generator().manual_seed(0))
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    expected = theirs(x, src_mask=mask, is_causal=True)
    assert_close(block(x, random_ids(2, 9), None, CausalAttend()), expected, atol=1e-5, rtol=1e-5)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda h: 0.5 * h * (1 + torch.tanh((2 / math.pi) ** 0.5 * (h + 0.044715 * h**3))),
    "gelu": lambda h: 0.5 * h * (1 + torch.erf(h / 2**0.5)),
    "relu": lambda h: h.clamp_min(0),
    "relu2": lambda h: h.clamp_min(0) ** 2,
    "swiglu": lambda h: h[..., :128] / (1 + torch.exp(-h[..., :128])) * h[..., 128:],
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward(activation: str) -> None:
    block = tiny_gpt(tiny_config(activation=activation)).blocks[0]
    assert isinstance(block, Block)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    hidden = x @ block.mlp_up.weight.T + block.mlp_up.bias
    expected = ACTIVATIONS[activation](hidden) @ block.mlp_down.weight.T + block.mlp_down.bias
    assert_close(block.mlp(x), expected, atol=1e-5, rtol=1e-5)


def test_qk_norm_gives_every_head_length_one() -> None:
    gpt = tiny_gpt(tiny_config(**MODERN))
    for block in gpt.blocks:
        assert isinstance(block, Block)
        block.query_norm.reset_parameters()
        block.key_norm.reset_parameters()
    recording = RecordingAttend()
    gpt.transform(random_ids(2, 9), torch.arange(9).expand(2, 9), recording)
    for heads in (*recording.q, *recording.k):  # rotation keeps lengths
        assert_close(heads.square().mean(dim=-1), torch.ones(2, 4, 9), atol=1e-4, rtol=0)


def test_a_tied_head_counts_once() -> None:
    tied, untied = tiny_gpt(tiny_config()), tiny_gpt(tiny_config(tied_head=False))
    rows = tied.config.padded_vocab_size
    assert rows == 320
    assert untied.parameter_count() - tied.parameter_count() == rows * tied.config.d_model
    assert "head.weight" not in tied.state_dict()
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    assert_close(tied.logits(x), x @ tied.token_embedding.weight[:257].T)
    assert_close(untied.logits(x), x @ untied.head.weight[:257].T)


def test_gpt2_small_has_124_million_parameters() -> None:
    config = gpt2_shape(
        vocab_size=50257,
        padded_vocab_size=50257,
        context_length=1024,
        n_layer=12,
        n_head=12,
        d_model=768,
    )
    with torch.device("meta"):
        assert GPT(config).parameter_count() == 124_439_808


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_bias", [True, False])
@pytest.mark.parametrize("tied_head", [True, False])
def test_padded_ids_are_cut_off(tied_head: bool, head_bias: bool, dtype: torch.dtype) -> None:
    """Rows beyond the vocabulary are there for speed: whatever they hold, nobody sees it."""
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


@pytest.mark.parametrize("tied_head", [True, False])
def test_a_heads_bias_is_added_to_its_logits(tied_head: bool) -> None:
    """Under one name, whosever matrix it is; in float32 where the weights are narrow."""
    gpt = tiny_gpt(tiny_config(tied_head=tied_head, head_bias=True))
    assert gpt.state_dict()["head.bias"].shape == (320,)
    assert ("head.weight" in gpt.state_dict()) is not tied_head
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    bias, with_bias = gpt.get_parameter("head.bias"), gpt.logits(x)
    narrow = gpt.to(torch.bfloat16).logits(x.to(torch.bfloat16))
    plain_narrow = narrow - bias[:257].float()
    bias.zero_()
    assert torch.equal(gpt.logits(x.to(torch.bfloat16)), narrow) is False
    assert_close(gpt.logits(x.to(torch.bfloat16)), plain_narrow)
    assert_close(narrow, with_bias, atol=0.1, rtol=0.1)


# Value embeddings


def recorded_values(gpt: GPT, ids: Tensor) -> list[Tensor]:
    recording = RecordingAttend()
    gpt.transform(ids, torch.arange(ids.shape[1]).expand_as(ids), recording)
    return recording.v


def test_a_gate_of_zero_lets_the_value_embedding_through() -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES["modern"]))
    block, ids = gpt.blocks[0], random_ids(2, 9)
    assert isinstance(block, Block)
    block.value_gate.weight.zero_()
    with_embedding = recorded_values(gpt, ids)[0]
    embedded = block.value_embedding(ids)
    block.value_embedding.weight.zero_()
    without = recorded_values(gpt, ids)[0]
    embedded = embedded.view(2, 9, 2, 8).transpose(1, 2)  # (B, K, T, D)
    assert_close(with_embedding, without + embedded)


def test_the_gate_weighs_each_head_of_each_position() -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES["modern"], n_head=6, head_dim=8, d_model=48))
    block, ids = gpt.blocks[2], random_ids(2, 9)
    assert isinstance(block, Block)
    assert block.value_gate.in_features == 32  # not the whole width
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0))
    gated = block.gated_value_embedding(x, ids)
    for head in range(2):
        gate = 2 / (1 + torch.exp(-(x[..., :32] @ block.value_gate.weight[head])))  # (B, T)
        rows = block.value_embedding.weight[ids, 8 * head : 8 * head + 8]  # (B, T, D)
        assert_close(gated[:, head], gate[..., None] * rows)


def test_value_embeddings_are_in_their_blocks_alone() -> None:
    gpt = tiny_gpt(tiny_config(**MODERN, n_layer=4))
    assert [hasattr(block, "value_embedding") for block in gpt.blocks] == [
        False,
        True,
        False,
        True,
    ]


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


def test_dropout_in_training_acts_on_the_attention_weights() -> None:
    gpt = tiny_gpt(tiny_config(dropout=0.5)).train()
    gpt.embedding_dropout.eval()
    for block in gpt.blocks:
        assert isinstance(block, Block)
        block.residual_dropout.eval()
    ids = random_ids(1, 20)
    torch.manual_seed(0)
    first, second = gpt(ids).logits, gpt(ids).logits
    torch.manual_seed(0)
    again = gpt(ids).logits
    assert torch.equal(first, again)
    assert not torch.allclose(first, second, atol=1e-2)


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


def test_position_tables_are_no_part_of_the_weights() -> None:
    for family in ("original", "llama"):
        names = tiny_gpt(tiny_config(**FAMILIES[family])).state_dict()
        assert not [name for name in names if "rope" in name or "sinusoid" in name]
