"""Attention and the GPT-2 block as a textbook writes them: separate matrices, every step spelled
out, nothing fused. The oracle of `test_published_numbers.py`; shares no code with `model`.

The order in which modules are created is part of it: it decides which random weights they get.

Shapes: B sequences, T positions, C = d_out, H heads, D = C / H.
"""

import math

import torch
from torch import Tensor, nn


class SingleHeadAttention(nn.Module):
    """Causal attention with one head and no output projection."""

    def __init__(self, d_in: int, d_out: int, dropout: float) -> None:
        super().__init__()
        self.query = nn.Linear(d_in, d_out, bias=False)
        self.key = nn.Linear(d_in, d_out, bias=False)
        self.value = nn.Linear(d_in, d_out, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d_in)
        weights = causal_weights(self.query(x), self.key(x))  # (B, T, T)
        return torch.matmul(self.dropout(weights), self.value(x))  # (B, T, d_out)


class MultiHeadAttention(nn.Module):
    """Causal attention with several heads and an output projection with bias."""

    def __init__(
        self, d_in: int, d_out: int, heads: int, dropout: float, *, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.projection = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d_in)
        queries, keys, values = (
            self.split(part(x)) for part in (self.query, self.key, self.value)
        )  # each (B, H, T, D)
        weights = causal_weights(queries, keys)  # (B, H, T, T)
        mixed = torch.matmul(self.dropout(weights), values).transpose(1, 2)  # (B, T, H, D)
        projected: Tensor = self.projection(mixed.reshape(*x.shape[:2], -1))
        return projected  # (B, T, C)

    def split(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        return x.view(batch, time, self.heads, width // self.heads).transpose(1, 2)


class GPT2Block(nn.Module):
    """LayerNorm, attention, residual; LayerNorm, feed-forward with GELU, residual."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(d_model, d_model, heads, dropout)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)
        self.attention_norm = LayerNorm(d_model)
        self.feed_forward_norm = LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        output: Tensor = x + self.dropout(self.down(gelu(self.up(self.feed_forward_norm(x)))))
        return output


class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(variance + 1e-5) + self.shift


def gelu(x: Tensor) -> Tensor:
    """The approximation by tanh that GPT-2 was trained with."""
    bent = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x * (1 + bent) / 2


def causal_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Attention weights (..., T, T) of (..., T, D): nothing looks ahead, rows sum to 1."""
    scores = torch.matmul(queries, keys.transpose(-2, -1)) / keys.shape[-1] ** 0.5
    ahead = torch.triu(torch.ones(scores.shape[-2:], dtype=torch.bool), diagonal=1)
    return torch.softmax(scores.masked_fill(ahead, -torch.inf), dim=-1)
