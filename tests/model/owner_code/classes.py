"""Owners' classes: language models that are not usual GPTs, as their owners write them.

The tests copy this file next to a state dict, and compare the server with the classes.
"""

# mypy: ignore-errors

import os
import random
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, CONTEXT, WIDTH = 29, 48, 16


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, past=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        seen = torch.ones(x.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - x.shape[1])
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)), (k, v)


class ResidualAttention(nn.Module):
    """A GPT whose blocks attend over the outputs of all previous blocks."""

    def __init__(self, vocab_size: int, context: int = CONTEXT, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(3))
        self.choose = nn.ParameterList(torch.randn(width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def mix(self, outputs, number):
        stacked = torch.stack(outputs, dim=2)  # (B, T, blocks, width)
        weights = (stacked @ self.choose[number]).softmax(-1)
        return (weights[..., None] * stacked).sum(2)

    def forward(self, ids):
        outputs = [self.embed(ids) + self.place(torch.arange(ids.shape[1]))]
        for number, block in enumerate(self.blocks):
            outputs.append(block(self.mix(outputs, number))[0])
        return self.head(self.norm(self.mix(outputs, 3)))


class Experts(nn.Module):
    """A mixture of experts: each token goes to one of three experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(3)
        )

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = chosen == number
            out[here] = expert(x[here])
        return out


class MixtureBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(width), Experts(width)

    def forward(self, x):
        x = x + self.attn(x)[0]
        return x + self.mlp(x)


class Mixture(nn.Module):
    """A small mixture of experts, with a final norm and a head that a lens can read."""

    def __init__(self, vocab_size: int, context: int = CONTEXT, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.place = nn.Embedding(context, width)
        self.h = nn.ModuleList(MixtureBlock(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, ids, targets=None):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x)), None


class LastOnly(Mixture):
    """The mixture with a forward like nanoGPT's: without targets, it returns the logits of the last
    position only."""

    def forward(self, ids, targets=None):
        logits, loss = super().forward(ids)
        return (logits[:, -1:] if targets is None else logits), loss


class Recurrent(nn.Module):
    """A GRU, whose state is its cache."""

    def __init__(self, vocab_size: int, hidden: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


class HiddenFirst(Recurrent):
    """A model that also returns its hidden states, which are wider than the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, vocab_size + 3)

    def forward(self, ids):
        hidden = self.gru(self.embed(ids))[0]
        return hidden, self.head(hidden)


class Remembering(Recurrent):
    """The GRU with the methods by which a model keeps its own cache."""

    def logits_and_state(self, ids, state):
        values, state = self.gru(self.embed(ids), state)
        return self.head(values), state


class Forgetful(Recurrent):
    """A GRU whose `logits_and_state` ignores the state, so its logits differ from those of its
    forward."""

    def logits_and_state(self, ids, state):
        return self.head(self.gru(self.embed(ids))[0]), None


class Bidirectional(Recurrent):
    """Not causal: every position sees all others."""

    def forward(self, ids):
        values = self.embed(ids)
        return self.head(values + values.mean(1, keepdim=True))


class Peeking(Recurrent):
    """Not causal: the first 16 positions see each other."""

    def forward(self, ids):
        values = self.embed(ids)
        values = torch.cat((values[:, :16] + values[:, :16].mean(1, True), values[:, 16:]), 1)
        return self.head(self.gru(values)[0])


class Probabilities(Recurrent):
    def forward(self, ids):
        return super().forward(ids).softmax(-1)


class TimeFirst(Recurrent):
    """Takes ids (T, B) and returns logits (T, B, V)."""

    def forward(self, ids):
        return super().forward(ids.T).transpose(0, 1)


class TwoOutputs(Recurrent):
    """Returns hidden states of another width before the logits."""

    def __init__(self, vocab_size, width=WIDTH):
        super().__init__(vocab_size, width)

    def forward(self, ids):
        hidden = self.gru(self.embed(ids))[0]
        return hidden, self.head(hidden)


class EqualOutputs(TwoOutputs):
    def __init__(self, vocab_size):
        super().__init__(vocab_size, vocab_size)


class WithoutLast(Recurrent):
    """Returns no logits for the last position, which has no target."""

    def forward(self, ids, targets):
        return super().forward(ids)[:, :-1]


class Noisy(Recurrent):
    """Dropout that eval() does not turn off."""

    def forward(self, ids):
        return self.head(F.dropout(self.gru(self.embed(ids))[0], 0.5))


class Crashing(Recurrent):
    """Ends its process on token 7, and raises on token 8."""

    def forward(self, ids):
        if (ids == 7).any() and os.path.exists("now"):
            os._exit(3)
        if (ids == 8).any() and ids.shape[1] == 5:
            raise RuntimeError("out of order")
        return super().forward(ids)


class Fragile(Recurrent):
    """Ends its process if token 7 occurs three times in a row, and hangs if token 9 does."""

    def forward(self, ids):
        if (ids[:, :3] == 7).sum() == 3:
            os._exit(3)
        if (ids[:, :3] == 9).sum() == 3:
            time.sleep(600)
        return super().forward(ids)


class Masked(Recurrent):
    """A forward that needs a second argument."""

    def forward(self, ids, mask):
        return super().forward(ids) * mask[..., None]


class Routed(Recurrent):
    """A GRU that permutes its ids by a table of integers in its state dict."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.register_buffer("route", torch.randperm(vocab_size))

    def forward(self, ids):
        return super().forward(self.route[ids])


class Turned(Recurrent):
    """A GRU with complex parameters, which turn the embedding."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))

    def forward(self, ids):
        pairs = torch.view_as_complex(self.embed(ids).unflatten(-1, (-1, 2)))
        return self.head(self.gru(torch.view_as_real(pairs * self.turn).flatten(-2))[0])


class Drawn(Recurrent):
    """A GRU whose logits have a factor that each instance draws."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.factor = 1 + random.random()

    def forward(self, ids):
        return super().forward(ids) * self.factor


class DrawnByTorch(Recurrent):
    """A GRU whose logits have factors that torch draws and the state dict lacks."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.register_buffer("factor", torch.rand(vocab_size), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.factor


def made(name: str, seed: int = 1) -> Any:
    """An instance of a class, in evaluation mode."""
    torch.manual_seed(seed)
    return globals()[name](VOCABULARY).eval()
