"""Matrix attention, compared with the fused kernel and with an explicit softmax."""

import pytest
import torch
from torch import Tensor

from logitd.model.training.step import matrix_attention
from logitd.model.training.step.matrix_attention import MatrixAttend
from logitd.model.transformer.attention import CausalAttend, attention_probs, attention_scores


def _inputs(heads: int, kv_heads: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, heads, length, 8, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, length, 8, requires_grad=True) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 4, 9, 12])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_matrix_attention_is_causal_attention(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, length: int, window: int | None
) -> None:
    """Texts are shorter than a block, fill a whole number of blocks, or end within a block."""
    monkeypatch.setattr(matrix_attention, "QUERIES", 4)
    inputs = _inputs(4, kv_heads, length)
    weights = torch.randn(2, 4, length, 8)
    attends = MatrixAttend(torch.float32), CausalAttend()
    mine, theirs = (attend(0, *inputs, window) for attend in attends)
    torch.testing.assert_close(mine, theirs)
    gradients = (torch.autograd.grad((out * weights).sum(), inputs) for out in (mine, theirs))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other)


def test_bfloat16_is_close_to_exact_attention() -> None:
    q, k, v = _inputs(4, 2, 300)
    weights = torch.randn(2, 4, 300, 8)
    mine = MatrixAttend(torch.bfloat16)(0, q, k, v)
    exact = CausalAttend()(0, q, k, v)
    assert mine.dtype == torch.bfloat16
    gradients = (
        torch.autograd.grad((out.float() * weights).sum(), (q, k, v)) for out in (mine, exact)
    )
    for own, other in ((mine, exact), *zip(*gradients, strict=True)):
        assert own.shape == other.shape
        assert float((own.float() - other).detach().norm()) < 0.02 * float(other.detach().norm())


def test_autocast_does_not_change_the_result() -> None:
    q, k, v = _inputs(2, 2, 20)
    attend = MatrixAttend(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = attend(0, q, k, v)
    assert torch.equal(inside, attend(0, q, k, v))


def test_dropout_hides_the_same_weights_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_attention, "QUERIES", 4)
    q, k, v = _inputs(2, 2, 8)
    attend = MatrixAttend(torch.float32, dropout=0.5)
    torch.manual_seed(1)
    out = attend(0, q, k, v)
    torch.manual_seed(1)  # the factors of the two blocks, drawn as the forward pass draws them
    factors = [
        torch.nn.functional.dropout(torch.ones(4, 4, end), 0.5).view(2, 2, 4, end) for end in (4, 8)
    ]
    factor = torch.cat([torch.nn.functional.pad(factors[0], (0, 4)), factors[1]], dim=2)
    expected = (attention_probs(attention_scores(q, k)) * factor) @ v
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    gradients = (torch.autograd.grad((each * weights).sum(), (q, k, v)) for each in (out, expected))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other)


def test_attention_without_dropout_draws_nothing() -> None:
    before = torch.get_rng_state()
    ones = torch.ones(1, 2, 8, 4)
    MatrixAttend(torch.float32)(0, ones, ones, ones)
    assert torch.equal(torch.get_rng_state(), before)
