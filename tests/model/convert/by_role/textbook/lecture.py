"""The lecture's model: one module per attention head, ReLU, an output layer with a bias, and a
`forward` that returns logits and a loss.

Scores are divided by the square root of the head width or of the whole width.
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
    steps,
)


class LectureHead(nn.Module):
    tril: Tensor

    def __init__(self, width: int, size: int, length: int, over: float) -> None:
        super().__init__()
        self.key = nn.Linear(width, size, bias=False)
        self.query = nn.Linear(width, size, bias=False)
        self.value = nn.Linear(width, size, bias=False)
        self.register_buffer("tril", torch.ones(length, length).tril())
        self.over = over

    def forward(self, x: Tensor) -> Tensor:
        return attend(self.query(x), self.key(x), self.value(x), math.sqrt(self.over))


class LectureHeads(nn.Module):
    def __init__(self, width: int, heads: int, length: int, over: float) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            LectureHead(width, width // heads, length, over) for _ in range(heads)
        )
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class LectureFeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class LectureBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int, over: float) -> None:
        super().__init__()
        self.sa = LectureHeads(width, heads, length, over)
        self.ffwd = LectureFeedForward(width)
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.sa(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


class Lecture(nn.Module):
    """Pre-LN, ReLU, an output layer with a bias. Attention scores are divided by the square root of
    the whole width or of the head width."""

    def __init__(
        self,
        *,
        whole_width: bool = True,
        vocab: int = VOCAB,
        width: int = WIDTH,
        heads: int = HEADS,
        layers: int = LAYERS,
        length: int = CONTEXT,
    ) -> None:
        super().__init__()
        over = width if whole_width else width // heads
        self.token_embedding_table = nn.Embedding(vocab, width)
        self.position_embedding_table = nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            *(LectureBlock(width, heads, length, over) for _ in range(layers))
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.token_embedding_table(idx) + self.position_embedding_table(steps(idx))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.transpose(1, 2), targets)
