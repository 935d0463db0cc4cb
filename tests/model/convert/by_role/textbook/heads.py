"""Heads in unusual forms: each with biases of its own, fused head by head, or a single wide one.

Covers post-LN without a final norm, and a feed-forward without its second matrix. Does not have
rotary positions: see `llama.py`.
"""

import math

import torch
import torch.nn.functional as F
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


class BiasedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.wk, self.wq, self.wv = (nn.Linear(WIDTH, size) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        return attend(q, k, v, math.sqrt(q.shape[-1]))


class BiasedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_attentions = nn.ModuleList(BiasedHead() for _ in range(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.head_attentions], dim=-1))


class InnerFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x)


class BiasedDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mh_attention = BiasedHeads()
        self.ffn = InnerFeedForward()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.mh_attention(x))
        return self.norm2(x + self.ffn(x))


class EmbeddingMatrix(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.emb_matrix = nn.Embedding(rows, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.emb_matrix(ids)


class PerHeadPost(nn.Module):
    """Heads with biases, post-LN without a final norm, a head with bias."""

    def __init__(self) -> None:
        super().__init__()
        self.token_emb, self.pos_emb = EmbeddingMatrix(VOCAB), EmbeddingMatrix(CONTEXT)
        self.decoders = nn.ModuleList(BiasedDecoder() for _ in range(LAYERS))
        self.linear = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_emb(ids) + self.pos_emb(steps(ids))
        for decoder in self.decoders:
            x = decoder(x)
        return self.linear(x)


class FusedAttention(nn.Module):
    """Rows of the fused matrix: for each head its query, key and value; or all keys first."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "by head":
            rows = self.query_key_value(x).unflatten(2, (HEADS, 3, -1))  # (B, T, H, 3, D)
            q, k, v = (rows[:, :, :, part].transpose(1, 2) for part in range(3))
        else:
            k, q, v = (split(part, HEADS) for part in self.query_key_value(x).chunk(3, dim=2))
        return self.dense(merge(attend(q, k, v, math.sqrt(q.shape[-1]))))


class DenseMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(WIDTH, 4 * WIDTH)
        self.dense_4h_to_h = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class FusedBlock(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.attention = FusedAttention(order)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = DenseMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class HeadByHead(nn.Module):
    """A fused query, key and value that lies head by head, or keys first."""

    def __init__(self, order: str = "by head") -> None:
        super().__init__()
        self.embed_in = nn.Embedding(VOCAB, WIDTH)
        self.embed_pos = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(FusedBlock(order) for _ in range(LAYERS))
        self.final_layer_norm = nn.LayerNorm(WIDTH)
        self.embed_out = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_in(ids) + self.embed_pos(steps(ids))
        for layer in self.layers:
            x = layer(x)
        return self.embed_out(self.final_layer_norm(x))


class SingleHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(CONTEXT, CONTEXT).tril())

    def forward(self, x: Tensor) -> Tensor:
        return attend(self.query(x), self.key(x), self.value(x), math.sqrt(WIDTH))


class SingleHeadBlock(nn.Module):
    def __init__(self, *, second: bool) -> None:
        super().__init__()
        self.sa = SingleHead()
        hidden = 2 * WIDTH if second else WIDTH
        self.ff = nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU())
        if second:
            self.ff.append(nn.Linear(hidden, WIDTH))
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.sa(self.ln1(x))
        return x + self.ff(self.ln2(x))


class OneHead(nn.Module):
    """One head as wide as the stream, without an output projection; the feed-forward with its
    second matrix or without it."""

    def __init__(self, *, second: bool = True) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(VOCAB, WIDTH)
        self.pos_emb = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(SingleHeadBlock(second=second) for _ in range(LAYERS)))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_emb(ids) + self.pos_emb(steps(ids))
        return self.head(self.ln_f(self.blocks(x)))
