"""Norms in unusual places: behind post-LN layers, and one for attention and feed-forward.

Covers a norm that is in the file and not applied. Does not have RMS norms: see `llama.py`.
"""

import math

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
from tests.model.convert.by_role.textbook.heads import EmbeddingMatrix
from tests.model.convert.by_role.textbook.lecture import LectureFeedForward


class ApartAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part(x), HEADS) for part in (self.W_q, self.W_k, self.W_v))
        return self.W_o(merge(attend(q, k, v, math.sqrt(q.shape[-1]))))


class PostBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = ApartAttention()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.ff = LectureFeedForward(WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(x + self.attn(x))
        return self.ln2(x + self.ff(x))


class PostWithFinal(nn.Module):
    """Post-LN and yet a norm behind the layers, which is applied or only in the file."""

    def __init__(self, *, applied: bool = True) -> None:
        super().__init__()
        self.token_emb, self.pos_emb = EmbeddingMatrix(VOCAB), EmbeddingMatrix(CONTEXT)
        self.blocks = nn.ModuleList(PostBlock() for _ in range(LAYERS))
        self.ln_final = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.applied = applied

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_emb(ids) + self.pos_emb(steps(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_final(x) if self.applied else x)


class ParallelBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.attn = ApartAttention()
        self.fc_in = nn.Linear(WIDTH, 80)
        self.fc_out = nn.Linear(80, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln(x)
        return x + self.attn(h) + self.fc_out(F.gelu(self.fc_in(h)))


class SharedNorm(nn.Module):
    """Attention and feed-forward beside each other, on one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(ParallelBlock() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(steps(ids))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))
