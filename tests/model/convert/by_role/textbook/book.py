"""The book: dictionaries for settings, norms with scale and shift, the mask as a buffer.

Covers its GPT with every part. Leaves dropout out: it is 0 in evaluation.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.model.convert.by_role.textbook.common import (
    CONTEXT,
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    attend,
    merge,
    split,
    steps,
)

BOOK: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "context_length": CONTEXT,
    "emb_dim": WIDTH,
    "n_heads": HEADS,
    "n_layers": LAYERS,
    "drop_rate": 0.0,
    "qkv_bias": False,
}


class BookNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return (
            self.scale * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            + self.shift
        )


class BookGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class BookAttention(nn.Module):
    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        width, bias, length = cfg["emb_dim"], cfg["qkv_bias"], cfg["context_length"]
        self.heads = cfg["n_heads"]
        self.W_query = nn.Linear(width, width, bias=bias)
        self.W_key = nn.Linear(width, width, bias=bias)
        self.W_value = nn.Linear(width, width, bias=bias)
        self.out_proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(length, length).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part(x), self.heads) for part in (self.W_query, self.W_key, self.W_value))
        return self.out_proj(merge(attend(q, k, v, math.sqrt(q.shape[-1]))))


class BookFeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), BookGELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class BookBlock(nn.Module):
    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        self.att = BookAttention(cfg)
        self.ff = BookFeedForward(cfg["emb_dim"])
        self.norm1 = BookNorm(cfg["emb_dim"])
        self.norm2 = BookNorm(cfg["emb_dim"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Book(nn.Module):
    """Pre-LN, tanh GELU, learned positions, a head of its own without bias."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.pos_emb = nn.Embedding(cfg["context_length"], cfg["emb_dim"])
        self.trf_blocks = nn.Sequential(*(BookBlock(cfg) for _ in range(cfg["n_layers"])))
        self.final_norm = BookNorm(cfg["emb_dim"])
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)

    def forward(self, in_idx: Tensor) -> Tensor:
        x = self.tok_emb(in_idx) + self.pos_emb(steps(in_idx))
        return self.out_head(self.final_norm(self.trf_blocks(x)))
