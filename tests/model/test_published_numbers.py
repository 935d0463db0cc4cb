"""Numbers that others have printed, on the textbook blocks of `textbook.py` and on ours.

All are for torch's CPU generator and float32. The last digits depend on the instruction set, hence
the tolerances.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from logitd.model.transformer.attention import CausalAttend, attention_probs, attention_scores
from logitd.model.transformer.config import gpt2_shape
from logitd.model.transformer.gpt import Block
from tests.model import textbook

INPUTS = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)


def test_multi_head_attention_from_3_to_2() -> None:
    torch.manual_seed(123)
    attention = textbook.MultiHeadAttention(3, 2, heads=2, dropout=0.0)
    expected = torch.tensor(
        [
            [0.3190, 0.4858],
            [0.2943, 0.3897],
            [0.2856, 0.3593],
            [0.2693, 0.3873],
            [0.2639, 0.3928],
            [0.2575, 0.4028],
        ]
    )
    output = attention(torch.stack((INPUTS, INPUTS)))
    assert_close(output, torch.stack((expected, expected)), atol=1e-4, rtol=0)


def test_two_single_heads_side_by_side() -> None:
    torch.manual_seed(123)
    heads = [textbook.SingleHeadAttention(3, 2, dropout=0.0) for _ in range(2)]
    output = torch.cat([head(INPUTS[None]) for head in heads], dim=-1)
    assert output.shape == (1, 6, 4)
    expected = torch.tensor([-0.4519, 0.2216, 0.4772, 0.1063])
    assert_close(output[0, 0], expected, atol=1e-4, rtol=0)


# The GPT-2 block: 768 wide, 12 heads, dropout 0.1, no bias in query, key and value.

PUBLISHED = torch.tensor([-0.005541101, 0.097220957, -0.112203188])


@pytest.fixture
def block_case() -> tuple[Tensor, textbook.GPT2Block]:
    """Input and block, drawn in this order; the generator stands where the forward starts."""
    torch.manual_seed(123)
    x = torch.rand(2, 4, 768)
    return x, textbook.GPT2Block(768, heads=12, dropout=0.1)


def our_block(theirs: textbook.GPT2Block) -> Callable[[Tensor], Tensor]:
    """`model.gpt.Block` with the weights of a textbook block, as a function of x alone."""
    config = gpt2_shape(
        vocab_size=50257,
        context_length=1024,
        n_layer=12,
        n_head=12,
        d_model=768,
        qkv_bias=False,
        dropout=0.1,
    )
    block = Block(config, layer=0)
    attention = theirs.attention
    block.load_state_dict(
        {
            "qkv.weight": torch.cat(
                [part.weight for part in (attention.query, attention.key, attention.value)]
            ),
            "attention_out.weight": attention.projection.weight,
            "attention_out.bias": attention.projection.bias,
            "mlp_up.weight": theirs.up.weight,
            "mlp_up.bias": theirs.up.bias,
            "mlp_down.weight": theirs.down.weight,
            "mlp_down.bias": theirs.down.bias,
            "attention_norm.weight": theirs.attention_norm.scale,
            "attention_norm.bias": theirs.attention_norm.shift,
            "mlp_norm.weight": theirs.feed_forward_norm.scale,
            "mlp_norm.bias": theirs.feed_forward_norm.shift,
        }
    )
    block.train(theirs.training)
    attend = CausalAttend(config.dropout if theirs.training else 0.0)
    token_ids = torch.zeros(2, 4, dtype=torch.long)  # only value embeddings would look at them

    def run(x: Tensor) -> Tensor:
        output: Tensor = block(x, token_ids, None, attend)
        return output

    return run


def test_gpt2_block_of_the_textbook(block_case: tuple[Tensor, textbook.GPT2Block]) -> None:
    x, block = block_case
    assert sum(parameter.numel() for parameter in block.parameters()) == 7_085_568
    output = block.train()(x)
    assert output.shape == (2, 4, 768)
    assert_close(output[0, 0, :3], PUBLISHED, atol=2e-6, rtol=0)


def test_our_block_in_training_draws_the_same_dropout(
    block_case: tuple[Tensor, textbook.GPT2Block],
) -> None:
    """The published digits need every dropout mask in its place: attention weights first, then the
    two residual branches. So they pin ours too, the fused attention kernel included."""
    x, theirs = block_case
    before_forward = torch.get_rng_state()
    expected = theirs.train()(x)
    ours = our_block(theirs)
    torch.set_rng_state(before_forward)
    output = ours(x)
    assert_close(output[0, 0, :3], PUBLISHED, atol=2e-6, rtol=0)
    assert_close(output, expected, atol=2e-6, rtol=1e-5)


def test_our_block_in_evaluation(block_case: tuple[Tensor, textbook.GPT2Block]) -> None:
    x, theirs = block_case
    expected = theirs.eval()(x)
    assert not torch.allclose(expected[0, 0, :3], PUBLISHED, atol=1e-3)  # dropout did something
    assert_close(our_block(theirs)(x), expected, atol=2e-6, rtol=1e-5)


def test_our_block_has_the_published_number_of_parameters() -> None:
    config = gpt2_shape(
        vocab_size=50257, context_length=1024, n_layer=12, n_head=12, d_model=768, qkv_bias=False
    )
    with torch.device("meta"):
        block = Block(config, layer=0)
    assert sum(parameter.numel() for parameter in block.parameters()) == 7_085_568


# Four heads at width 768, with and without a causal mask.


@pytest.fixture
def scores() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 10, 4, 192, generator=generator).transpose(2, 3)
    return attention_scores(q, k)


def test_scores_without_a_mask_give_rows_that_sum_to_1(scores: Tensor) -> None:
    assert scores.shape == (2, 4, 10, 10)
    probs = attention_probs(scores, causal=False)
    assert_close(probs.sum(dim=-1), torch.ones(2, 4, 10))
    assert (probs > 0).all()  # every position sees every other


def test_the_causal_mask_leaves_the_first_row_to_itself(scores: Tensor) -> None:
    probs = attention_probs(scores, causal=True)
    assert torch.equal(probs[:, :, 0], torch.eye(10)[0].expand(2, 4, 10))
    assert_close(probs.sum(dim=-1), torch.ones(2, 4, 10))
