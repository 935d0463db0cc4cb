"""The forward of training is the model's forward."""

from dataclasses import replace

import pytest
import torch

from model.attention import CausalAttend
from model.config import MODERN, gpt2_shape
from model.device import Placement
from model.gpt import GPT
from model.training.forward import Forward, MatrixAttend, training_placement

CPU = torch.device("cpu")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_matrix_attention_is_causal_attention(kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 9, 8, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 9, 8, requires_grad=True) for _ in range(2))
    attend = MatrixAttend(torch.float32)
    mine, theirs = attend(0, q, k, v), CausalAttend()(0, q, k, v)
    torch.testing.assert_close(mine, theirs)
    for mine_, theirs_ in zip(
        torch.autograd.grad(mine.square().sum(), (q, k, v)),
        torch.autograd.grad(theirs.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine_, theirs_)
    short = attend(0, q[:, :, :5], k[:, :, :5], v[:, :, :5])
    torch.testing.assert_close(short, theirs[:, :, :5])


def test_matrix_attention_drops_out_only_when_told() -> None:
    q = k = v = torch.randn(1, 2, 8, 4)
    before = torch.get_rng_state()
    MatrixAttend(torch.float32)(0, q, k, v)
    assert torch.equal(torch.get_rng_state(), before)
    MatrixAttend(torch.float32, dropout=0.5)(0, q, k, v)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_the_logits_are_the_models_own() -> None:
    torch.manual_seed(0)
    shape = {**MODERN, "n_kv_head": 1}
    gpt = GPT(
        gpt2_shape(vocab_size=50, context_length=16, n_layer=2, n_head=2, d_model=32, **shape)
    )
    ids = torch.randint(50, (3, 16))
    expected = gpt(ids).logits
    exact = Placement(CPU, torch.float32, 1)
    torch.testing.assert_close(Forward(gpt, exact, dropout=0.0)(ids), expected)
    rough = replace(exact, dtype=torch.bfloat16)
    logits = Forward(gpt, rough, dropout=0.0)(ids)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, atol=0.02, rtol=0.05)


def test_what_is_asked_for_is_taken() -> None:
    assert training_placement("cpu", "float32", 3) == Placement(CPU, torch.float32, 3)
    assert training_placement("cpu", "bfloat16", 1).dtype == torch.bfloat16
    assert training_placement("cpu", "auto", 1).dtype in (torch.float32, torch.bfloat16)
