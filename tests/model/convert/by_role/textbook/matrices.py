"""Matrices in unusual forms: (in, out), raw parameters with an axis for heads, gate and up in one.

Covers whole models of these. Does not have heads with modules of their own: see `heads.py`.
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
from tests.model.convert.by_role.textbook.llama import Rms


class InOut(nn.Module):
    """A matrix (in, out) with a bias, as GPT-2's first code had them."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class InOutAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = InOut(WIDTH, 3 * WIDTH), InOut(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part, HEADS) for part in self.c_attn(x).chunk(3, dim=2))
        return self.c_proj(merge(attend(q, k, v, math.sqrt(q.shape[-1]))))


class InOutMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = InOut(WIDTH, 4 * WIDTH), InOut(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class InOutBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = InOutAttention(), InOutMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transposed(nn.Module):
    """GPT-2's matrices, which lie (in, out); the head is the embedding and not in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(InOutBlock() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(steps(ids))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


class RawNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.w, self.b, eps=1e-5)


def raw(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


class RawAttention(nn.Module):
    mask: Tensor
    IGNORE: Tensor

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.W_Q, self.W_K, self.W_V = (raw(HEADS, WIDTH, size) for _ in range(3))
        self.W_O = raw(HEADS, size, WIDTH)
        self.b_Q, self.b_K, self.b_V = (raw(HEADS, size) for _ in range(3))
        self.b_O = raw(WIDTH)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).tril().bool())
        self.register_buffer("IGNORE", torch.tensor(-math.inf))

    def forward(self, x: Tensor) -> Tensor:
        def heads(weight: Tensor, bias: Tensor) -> Tensor:
            return torch.einsum("btc,hcd->bhtd", x, weight) + bias[:, None]

        q, k = heads(self.W_Q, self.b_Q), heads(self.W_K, self.b_K)
        z = attend(q, k, heads(self.W_V, self.b_V), math.sqrt(q.shape[-1]))
        return torch.einsum("bhtd,hdc->btc", z, self.W_O) + self.b_O


class RawMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_in, self.b_in = raw(WIDTH, 4 * WIDTH), raw(4 * WIDTH)
        self.W_out, self.b_out = raw(4 * WIDTH, WIDTH), raw(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.W_in + self.b_in, approximate="tanh") @ self.W_out + self.b_out


class RawBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = RawNorm(), RawNorm()
        self.attn, self.mlp = RawAttention(), RawMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class RawEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_E = raw(VOCAB, WIDTH)


class RawPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_pos = raw(CONTEXT, WIDTH)


class RawUnembed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_U, self.b_U = raw(WIDTH, VOCAB), raw(VOCAB)


class Raw(nn.Module):
    """TransformerLens' parameters: no torch layers, an axis for the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos_embed = RawEmbed(), RawPositions()
        self.blocks = nn.ModuleList(RawBlock() for _ in range(LAYERS))
        self.ln_final = RawNorm()
        self.unembed = RawUnembed()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed.W_E[tokens] + self.pos_embed.W_pos[steps(tokens)]
        for block in self.blocks:
            x = block(x)
        return self.ln_final(x) @ self.unembed.W_U + self.unembed.b_U


class GluAttention(nn.Module):
    """Scores are not divided."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part, HEADS) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(merge(attend(q, k, v, 1.0)))


class GluFeedForward(nn.Module):
    """Gate and up in one matrix, in either order."""

    def __init__(self, *, gate_first: bool) -> None:
        super().__init__()
        self.w12 = nn.Linear(WIDTH, 80)
        self.w3 = nn.Linear(40, WIDTH)
        self.gate_first = gate_first

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        gate, up = (gate, up) if self.gate_first else (up, gate)
        return self.w3(F.silu(gate) * up)


class GluBlock(nn.Module):
    def __init__(self, *, gate_first: bool) -> None:
        super().__init__()
        self.rmsnorm1, self.rmsnorm2 = Rms(WIDTH), Rms(WIDTH)
        self.attn, self.ffn = GluAttention(), GluFeedForward(gate_first=gate_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.rmsnorm1(x))
        return x + self.ffn(self.rmsnorm2(x))


class Glu(nn.Module):
    """No positions at all, scores as they are, gate and up in one matrix with a bias."""

    def __init__(self, *, gate_first: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(GluBlock(gate_first=gate_first) for _ in range(LAYERS))
        self.rmsnorm_f = Rms(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.rmsnorm_f(x))
