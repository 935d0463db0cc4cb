"""nanoGPT and minGPT, which use the same names but differ in the GELU and in the head.

Covers tied and untied heads, with and without biases. Dropout is left out because it is 0 in
evaluation.
"""

import math
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class NanoConfig:
    block_size: int = CONTEXT
    vocab_size: int = VOCAB
    n_layer: int = LAYERS
    n_head: int = HEADS
    n_embd: int = WIDTH
    dropout: float = 0.0
    bias: bool = True


class NanoAttention(nn.Module):
    def __init__(self, config: NanoConfig, *, mask: bool) -> None:
        super().__init__()
        self.heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        if mask:
            length = config.block_size
            self.register_buffer("bias", torch.ones(length, length).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part, self.heads) for part in self.c_attn(x).chunk(3, dim=2))
        return self.c_proj(merge(attend(q, k, v, math.sqrt(q.shape[-1]))))


class NanoMlp(nn.Module):
    def __init__(self, config: NanoConfig, activation: nn.Module) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.activation = activation
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))


class NanoBlock(nn.Module):
    def __init__(self, config: NanoConfig, activation: nn.Module, *, mask: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = NanoAttention(config, mask=mask)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = NanoMlp(config, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    """nanoGPT: exact GELU and a tied head; without targets it computes only the last position.
    minGPT: tanh GELU, an untied head, and a mask in every layer."""

    def __init__(self, config: NanoConfig, *, minimal: bool = False) -> None:
        super().__init__()
        self.config = config
        activation = nn.GELU(approximate="tanh" if minimal else "none")
        blocks = (NanoBlock(config, activation, mask=minimal) for _ in range(config.n_layer))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if not minimal:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts: Any = self.transformer
        x = parts["wte"](idx) + parts["wpe"](steps(idx))
        for block in parts["h"]:
            x = block(x)
        x = parts["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.transpose(1, 2), targets)
