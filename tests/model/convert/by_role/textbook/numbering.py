"""Layers that are numbered unusually: from 1, not at all, or in a list for each kind of part.

Covers whole models of these, made of the parts of others.
"""

from torch import Tensor, nn

from tests.model.convert.by_role.textbook.book import BOOK, BookBlock, BookNorm
from tests.model.convert.by_role.textbook.common import CONTEXT, LAYERS, VOCAB, WIDTH, steps
from tests.model.convert.by_role.textbook.heads import DenseMlp
from tests.model.convert.by_role.textbook.norms import ApartAttention


class FromOne(nn.Module):
    """Layers that were written out by hand, counted from 1."""

    def __init__(self) -> None:
        super().__init__()
        cfg = dict(BOOK) | {"qkv_bias": True}
        self.emb, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.block_1, self.block_2, self.block_3 = (BookBlock(cfg) for _ in range(3))
        self.norm = BookNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(steps(ids))
        return self.out(self.norm(self.block_3(self.block_2(self.block_1(x)))))


class NoNumber(nn.Module):
    """One block, and its parts beside the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.attention = ApartAttention()
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 72), nn.GELU(), nn.Linear(72, WIDTH))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.final_norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embedding(ids) + self.position_embedding(steps(ids))
        x = x + self.attention(self.norm1(x))
        x = x + self.feed_forward(self.norm2(x))
        return self.output(self.final_norm(x))


class Lists(nn.Module):
    """A list for each kind of part: attentions, feed-forwards, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.attns = nn.ModuleList(ApartAttention() for _ in range(LAYERS))
        self.mlps = nn.ModuleList(DenseMlp() for _ in range(LAYERS))
        self.attn_norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.mlp_norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_emb(ids) + self.pos_emb(steps(ids))
        parts = zip(self.attn_norms, self.attns, self.mlp_norms, self.mlps, strict=True)
        for first, attention, second, mlp in parts:
            x = x + attention(first(x))
            x = x + mlp(second(x))
        return self.head(self.ln_f(x))
