"""A small GPT in the shape of modded-nanogpt in 2026, in plain torch, as its owner might write it.

Its parts, after that project's list of techniques: banks of weights instead of modules per layer; a
bigram embedding of a part of the channels; smeared token embeddings; gated value embeddings; paired
heads; rotary positions of half a head, and keys of the other half shifted by one position; norms
without weights; short and long windows; outputs without their component along the position's own
value; gates of heads; a mix of heads; a layer without attention; a skip connection; mixed outputs
of earlier layers; squared ReLU; soft-capped logits.
"""

# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import nn

BIGRAMS, SHORT, LONG = 31, 4, 12


def bigram_hashes(ids: torch.Tensor) -> torch.Tensor:
    """The bucket of each id and the one before it; the first position has its own bucket."""
    pairs = (ids[:, 1:] * 36313 ^ ids[:, :-1] * 27191) % (BIGRAMS - 1)
    return F.pad(pairs, (1, 0), value=BIGRAMS - 1)


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


def before(x):
    """Each position's predecessor along the second axis; the first one is its own."""
    return torch.cat([x[:, :1], x[:, :-1]], 1)


class Attention(nn.Module):
    """Weights come from the model's bank."""

    def __init__(self, heads, size, paired):
        super().__init__()
        self.heads, self.size, self.paired = heads, size, paired

    def turn(self, x, places):
        """Rotary positions of the first half of a head's channels, in neighboring pairs."""
        speeds = (1 / 1024) ** torch.linspace(0, 1, self.size // 4)
        angles = places[:, None] * torch.cat([speeds, torch.zeros(self.size // 4)])
        cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)

    def forward(self, x, weights, window, value, gate, own, mix):
        b, t, _ = x.shape
        q, k, v = (x @ weights[:3].flatten(0, 1).T).view(b, t, 3, self.heads, self.size).unbind(2)
        q, k = norm(q), norm(k)
        v = v if value is None else v + value
        if self.paired:  # neighboring heads take turns along one sequence of twice the length
            q, k, v = (part.reshape(b, 2 * t, self.heads // 2, self.size) for part in (q, k, v))
        places = torch.arange(q.shape[1])
        q, k = self.turn(q, places), self.turn(k, places)
        if window == LONG:
            half = self.size // 2
            k = torch.cat([k[..., :half], before(k[..., half:])], -1)
        back = places[:, None] - places[None]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.1
        scores = scores.masked_fill((back < 0) | (back > window), -torch.inf)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(b, t, self.heads, -1)
        if own is not None:
            along = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-8)
            y = y - own.tanh()[..., None] * along * v
        if mix is not None:
            inward, outward = mix.chunk(2, -1)
            y = y + torch.einsum("bth,bthd->btd", norm(inward), y)[:, :, None] * outward[..., None]
        y = y if gate is None else y * gate[..., None]
        return y.flatten(2) @ weights[3]


class Speedrun(nn.Module):
    """Layers: paired heads; a long window; short; no attention; a long window over mixed layers."""

    def __init__(self, vocab_size: int, width: int = 16, heads: int = 2, layers: int = 5) -> None:
        super().__init__()
        self.heads, self.part = heads, width // 4
        self.embed = nn.Embedding(vocab_size, width)
        self.bigram_embed = nn.Embedding(BIGRAMS, self.part)
        self.register_buffer("signs", torch.randn(8, self.part).sign())
        self.smear_gate = nn.Linear(6, 1, bias=False)
        self.value_embeds = nn.Parameter(torch.randn(2, vocab_size, width))
        self.value_gates = nn.Parameter(torch.randn(2, heads, 12))
        self.attn_bank = nn.Parameter(torch.randn(layers - 1, 4, width, width) / 4)
        self.mlp_bank = nn.Parameter(torch.randn(layers, 2, 4 * width, width) / 4)
        self.lambdas = nn.Parameter(torch.rand(layers, 4) + 0.5)
        self.smear_lambda = nn.Parameter(torch.tensor(0.7))
        self.skip_lambda = nn.Parameter(torch.tensor(-0.4))
        self.gates_in = nn.ModuleList(nn.Linear(width, 8, bias=False) for _ in range(2))
        self.gates_out = nn.ModuleList(nn.Linear(8, 4 * heads + 2 * layers + 1) for _ in range(2))
        self.mixers = nn.ModuleList(nn.Linear(width, count) for count in (6, 4))
        self.attn, self.attn_paired = (Attention(heads, width // heads, p) for p in (False, True))
        self.lm_head = nn.Parameter(torch.randn(width, vocab_size))

    def gates(self, x, number):
        """Gates of heads, of the inputs that every layer adds again, and of the skip connection."""
        made, layers = self.gates_out[number](F.gelu(self.gates_in[number](x))), len(self.lambdas)
        return made.split([self.heads, self.heads, 2 * self.heads, layers, layers, 1], -1)

    def forward(self, ids, bigrams):
        x = self.embed(ids)
        smear = self.smear_lambda * torch.sigmoid(self.smear_gate(x[:, 1:, :6]))
        start = x = norm(torch.cat([x[:, :1], x[:, 1:] + smear * x[:, :-1]], 1))
        flips = self.signs[F.pad((ids[:, 1:] ^ ids[:, :-1]) % len(self.signs), (1, 0))]
        pair = F.pad(self.bigram_embed(bigrams) * flips, (0, x.shape[-1] - self.part))
        own, gate, mix, starts, pairs, skip = self.gates(start, 0)
        x = x + pair * pairs[..., :1]
        kept = {0: x}
        for layer, (stay, add, stay_mlp, add_mlp) in enumerate(self.lambdas):
            here, last = slice(layer, layer + 1), layer == len(self.lambdas) - 1
            if layer == 2:
                own, gate, mix, starts, pairs, skip = self.gates(x, 1)
            if layer == 3:
                x = x + self.skip_lambda.sigmoid() * skip * kept[1]
            else:
                seen = norm(kept.get(2, x))
                value = self.value(ids, seen, int(last)) if layer in (1, 4) else None
                if last:
                    a, b, c, d, e, f = self.mixers[0](x)[..., None].unbind(-2)
                    value = value + self.split(a * kept[0] + b * kept[2] + c * x)
                    x = (1 + d) * x + e * kept[0] + f * kept[2]
                attended = (self.attn if layer else self.attn_paired)(
                    seen,
                    self.attn_bank[layer - (layer > 3)],
                    LONG if layer in (1, 4) else SHORT,
                    value,
                    gate if layer in (1, 4) else None,
                    own if layer in (1, 2) else None,
                    mix if last else None,
                )
                x = stay * x + add * attended + start * starts[..., here]
                x = x + pair * pairs[..., here] * (layer > 0)
            up, down = self.mlp_bank[layer]
            x = stay_mlp * x + add_mlp * (F.relu(norm(x) @ up.T).square() @ down)
            kept[layer] = x if layer else kept[0]
        a, b, c, d = self.mixers[1](x)[..., None].unbind(-2)
        x = x + a * kept[0] + b * kept[2] + c * kept[3] + d * self.value_embeds[0][ids]
        return 23 * torch.sigmoid((norm(x) @ self.lm_head + 5) / 7.5)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1))

    def value(self, ids, x, number):
        """A gated value embedding of each token, by heads."""
        found = self.value_embeds[number][ids]
        both = torch.cat([x[..., :6], found[..., :6]], -1)
        return 2 * torch.sigmoid(both @ self.value_gates[number].T)[..., None] * self.split(found)
