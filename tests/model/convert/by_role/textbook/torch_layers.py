"""torch.nn's layers: TransformerEncoder, and MultiheadAttention in a hand-written block.

Covers pre- and post-LN, with sinusoidal positions stored in the file or computed. There is no final
norm.
"""

import math

import torch
from torch import Tensor, nn

from tests.model.convert.by_role.textbook.common import (
    CONTEXT,
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    steps,
    waves,
)


class Waves(nn.Module):
    """Adds sinusoidal positions. If `kept`, their table is part of the state dict."""

    pe: Tensor

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.register_buffer("pe", waves(CONTEXT, WIDTH)[None], persistent=kept)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[:, : x.shape[1]]


class EncoderStack(nn.Module):
    """nn.TransformerEncoderLayer with a causal mask. Embeddings are multiplied by the square root
    of the width."""

    def __init__(self, *, norm_first: bool, kept: bool, activation: str = "relu") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.pos_encoder = Waves(kept=kept)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 64, 0.0, activation, batch_first=True, norm_first=norm_first
        )
        self.transformer_encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.fc_out = nn.Linear(WIDTH, VOCAB)

    def forward(self, src: Tensor) -> Tensor:
        x = self.pos_encoder(self.embedding(src) * math.sqrt(WIDTH))
        later = torch.ones(src.shape[1], src.shape[1]).triu(1).bool()
        return self.fc_out(self.transformer_encoder(x, mask=later))


class MultiheadBlock(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ln1 = nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, WIDTH))
        self.ln2 = nn.LayerNorm(WIDTH)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool() if self.causal else None
        a, _ = self.attn(x, x, x, attn_mask=later, need_weights=False)
        x = self.ln1(x + a)
        return self.ln2(x + self.ff(x))


class Multihead(nn.Module):
    """A block around nn.MultiheadAttention: post-LN without a final norm, sinusoidal positions that
    are not in the file, no mask unless `causal`."""

    def __init__(self, *, causal: bool = True, halves: bool = False, learned: bool = False) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(VOCAB, WIDTH)
        self.pos_embed = nn.Embedding(CONTEXT, WIDTH) if learned else None
        self.transformer_blocks = nn.ModuleList(
            MultiheadBlock(causal=causal) for _ in range(LAYERS)
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB)
        self.halves = halves

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embed(ids)
        if self.pos_embed is not None:
            x = x + self.pos_embed(steps(ids))
        else:
            x = x + waves(ids.shape[1], WIDTH, halves=self.halves).to(x.dtype)
        for block in self.transformer_blocks:
            x = block(x)
        return self.lm_head(x)
