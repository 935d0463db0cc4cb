"""Llama, twice: llama2.c's names and pairs of neighbours; Hugging Face's names and halves.

Covers groups of heads, and norms of query and key with weights and without. Does not cache keys and
values: every forward computes all positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model.convert.by_role.textbook.common import (
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    attend,
    merge,
    rms,
    split,
    turned,
)


class Rms(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.eps) * self.weight


class TinyAttention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        size = width // heads
        self.heads, self.kv_heads = heads, kv_heads
        self.wq = nn.Linear(width, heads * size, bias=False)
        self.wk = nn.Linear(width, kv_heads * size, bias=False)
        self.wv = nn.Linear(width, kv_heads * size, bias=False)
        self.wo = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = turned(split(self.wq(x), self.heads), neighbours=True)
        k = turned(split(self.wk(x), self.kv_heads), neighbours=True)
        v = split(self.wv(x), self.kv_heads)
        group = self.heads // self.kv_heads
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        return self.wo(merge(attend(q, k, v, math.sqrt(q.shape[-1]))))


class TinyFeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TinyBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention = TinyAttention(width, heads, kv_heads)
        self.feed_forward = TinyFeedForward(width, 56)
        self.attention_norm = Rms(width)
        self.ffn_norm = Rms(width)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class TinyLlama(nn.Module):
    """llama2.c: RMSNorm, gated feed-forward, grouped heads, neighbours turn, tied head."""

    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(TinyBlock(WIDTH, HEADS, kv_heads) for _ in range(LAYERS))
        self.norm = Rms(WIDTH)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


class ProjAttention(nn.Module):
    def __init__(self, qk_norm: str, qk_eps: float, *, neighbours: bool) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=True)
        self.k_proj = nn.Linear(WIDTH, WIDTH // 2, bias=True)
        self.v_proj = nn.Linear(WIDTH, WIDTH // 2, bias=True)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        if qk_norm == "learned":
            self.q_norm, self.k_norm = Rms(size, qk_eps), Rms(size, qk_eps)
        self.qk_norm, self.qk_eps, self.neighbours = qk_norm, qk_eps, neighbours

    def forward(self, x: Tensor) -> Tensor:
        q, k = split(self.q_proj(x), HEADS), split(self.k_proj(x), HEADS // 2)
        if self.qk_norm == "learned":
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.qk_norm == "unit":
            q, k = rms(q, self.qk_eps), rms(k, self.qk_eps)
        q, k = (turned(part, neighbours=self.neighbours, theta=5_000.0) for part in (q, k))
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, split(self.v_proj(x), HEADS // 2)))
        return self.o_proj(merge(attend(q, k, v, math.sqrt(q.shape[-1]))))


class ProjMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 48, bias=False)
        self.up_proj = nn.Linear(WIDTH, 48, bias=False)
        self.down_proj = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ProjBlock(nn.Module):
    def __init__(self, qk_norm: str, qk_eps: float, *, neighbours: bool) -> None:
        super().__init__()
        self.input_layernorm = Rms(WIDTH, 1e-6)
        self.self_attn = ProjAttention(qk_norm, qk_eps, neighbours=neighbours)
        self.post_attention_layernorm = Rms(WIDTH, 1e-6)
        self.mlp = ProjMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ProjLlama(nn.Module):
    """Hugging Face's names: halves turn, norms of query and key with weights, without, or none."""

    def __init__(
        self, qk_norm: str = "learned", qk_eps: float = 1e-6, *, neighbours: bool = False
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            ProjBlock(qk_norm, qk_eps, neighbours=neighbours) for _ in range(LAYERS)
        )
        self.norm = Rms(WIDTH, 1e-6)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))
