"""Attention: the fused path, the path that records attention weights, and dropout. Values are
tested in `test_gpt.py`."""

import torch
from torch import Tensor
from torch.testing import assert_close

from logitd.model.transformer.attention import (
    CausalAttend,
    attention_probs,
    attention_scores,
)


def heads(n_head: int, n_kv_head: int, time: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (2, n_head, time, 8) and k, v (2, n_kv_head, time, 8)."""
    generator = torch.Generator().manual_seed(n_head * 100 + n_kv_head)
    q = 2 * torch.randn(2, n_head, time, 8, generator=generator)
    k, v = torch.randn(2, 2, n_kv_head, time, 8, generator=generator)
    return q, k, v


def test_attention_takes_fewer_queries_as_the_last_positions() -> None:
    q, k, _ = heads(4, 2)
    whole = attention_probs(attention_scores(q, k))
    last_three = attention_probs(attention_scores(q[:, :, -3:], k))
    assert last_three.shape == (2, 4, 3, 7)
    assert_close(last_three, whole[:, :, -3:])


def test_dropout_acts_on_the_attention_weights() -> None:
    """With unit vectors as values, the output equals the attention weights."""
    q, k, _ = heads(4, 4)
    v = torch.eye(7).expand(2, 4, 7, 7)
    probs = attention_probs(attention_scores(q, k))
    torch.manual_seed(0)
    dropped = CausalAttend(dropout=0.25)(0, q, k, v)
    zero = (dropped == 0) & (probs > 0)
    assert_close(torch.where(zero, 0, dropped), torch.where(zero, 0, probs / 0.75))
    assert 0.1 < (zero.sum() / (probs > 0).sum()).item() < 0.4  # 224 draws: six sigma
