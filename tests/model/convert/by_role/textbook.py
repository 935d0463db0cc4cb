"""GPTs as textbooks, lectures and people at home write them, small and with random weights.

A class for each habit, with the parameter names of that habit and a forward that is written down
plainly: scores, mask, softmax, sum. The classes share nothing but the few lines of attention below,
and nothing with what is tested. Not here: training, sampling, files.

Shapes: B sequences, T positions, C the width, H heads, D the width of a head, V ids.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 29, 16, 32, 4, 2


def draw(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter so that it matters: attention chooses, norms and biases are far from
    their initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                wide = 0.4 if "emb" in name.lower() else 1.3 * parameter.shape[-1] ** -0.5
                parameter.normal_(std=wide, generator=generator)
            elif "bias" in name or name.rpartition(".")[2] in ("shift", "beta") or ".b_" in name:
                parameter.normal_(std=0.3, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with drawn weights, in evaluation mode and without gradients."""
    draw(model, seed)
    return model.eval().requires_grad_(False)


def split(x: Tensor, heads: int) -> Tensor:
    """(B, T, H * D) to (B, H, T, D)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, H, T, D) to (B, T, H * D)."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, divisor: float, *, causal: bool = True) -> Tensor:
    """Attention of (..., T, D), each position over itself and what precedes it."""
    scores = q @ k.mT / divisor
    if causal:
        later = torch.ones(q.shape[-2], k.shape[-2]).triu(1).bool()
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(dim=-1) @ v


def steps(ids: Tensor) -> Tensor:
    """0, 1, 2, ... for ids (B, T)."""
    return torch.arange(ids.shape[1])


def waves(length: int, width: int, *, halves: bool = False) -> Tensor:
    """Sinusoidal positions (length, width): sine and cosine in turn, or all sines first."""
    table = torch.zeros(length, width, dtype=torch.float64)
    for position in range(length):
        for pair in range(width // 2):
            angle = position / 10_000.0 ** (2 * pair / width)
            sine, cosine = (pair, width // 2 + pair) if halves else (2 * pair, 2 * pair + 1)
            table[position, sine], table[position, cosine] = math.sin(angle), math.cos(angle)
    return table.float()


def turned(x: Tensor, *, neighbours: bool, theta: float = 10_000.0) -> Tensor:
    """Rotary positions of (B, H, T, D), as products of complex values."""
    time, width = x.shape[-2:]
    rates = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(time, dtype=torch.float64), rates)  # (T, D / 2)
    turn = torch.polar(torch.ones_like(angles), angles)
    if neighbours:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
    first, second = x.double().chunk(2, dim=-1)
    pairs = torch.complex(first, second) * turn
    return torch.cat((pairs.real, pairs.imag), dim=-1).to(x.dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square."""
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()


# The book: dictionaries for settings, norms with scale and shift.

BOOK: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "context_length": CONTEXT,
    "emb_dim": WIDTH,
    "n_heads": HEADS,
    "n_layers": LAYERS,
    "drop_rate": 0.0,
    "qkv_bias": False,
}


class BookNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return (
            self.scale * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            + self.shift
        )


class BookGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class BookAttention(nn.Module):
    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        width, bias, length = cfg["emb_dim"], cfg["qkv_bias"], cfg["context_length"]
        self.heads = cfg["n_heads"]
        self.W_query = nn.Linear(width, width, bias=bias)
        self.W_key = nn.Linear(width, width, bias=bias)
        self.W_value = nn.Linear(width, width, bias=bias)
        self.out_proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(length, length).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part(x), self.heads) for part in (self.W_query, self.W_key, self.W_value))
        return self.out_proj(merge(attend(q, k, v, math.sqrt(q.shape[-1]))))


class BookFeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), BookGELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class BookBlock(nn.Module):
    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        self.att = BookAttention(cfg)
        self.ff = BookFeedForward(cfg["emb_dim"])
        self.norm1 = BookNorm(cfg["emb_dim"])
        self.norm2 = BookNorm(cfg["emb_dim"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Book(nn.Module):
    """Pre-LN, tanh GELU, learned positions, a head of its own without bias."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.pos_emb = nn.Embedding(cfg["context_length"], cfg["emb_dim"])
        self.trf_blocks = nn.Sequential(*(BookBlock(cfg) for _ in range(cfg["n_layers"])))
        self.final_norm = BookNorm(cfg["emb_dim"])
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)

    def forward(self, in_idx: Tensor) -> Tensor:
        x = self.tok_emb(in_idx) + self.pos_emb(steps(in_idx))
        return self.out_head(self.final_norm(self.trf_blocks(x)))


# The lecture: a module for each head, ReLU, a head with bias, logits with a loss.


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
    """Pre-LN, ReLU, a head with bias; scores over the root of the whole width, or of a head's."""

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


# nanoGPT and minGPT: the same names, another GELU and another head.


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
    """nanoGPT: exact GELU, tied head; without targets it computes the last position alone."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(
                    NanoBlock(config, nn.GELU(), mask=False) for _ in range(config.n_layer)
                ),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
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


class Mini(nn.Module):
    """minGPT: tanh GELU, a head of its own, a mask in every layer."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(
                    NanoBlock(config, BookGELU(), mask=True) for _ in range(config.n_layer)
                ),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](idx) + parts["wpe"](steps(idx))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


# Llama, twice: llama2.c's names and pairs of neighbours; Hugging Face's names and halves.


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


# torch.nn's own layers.


class Waves(nn.Module):
    """Adds a table of sines; it is in the state dict where `kept`."""

    pe: Tensor

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.register_buffer("pe", waves(CONTEXT, WIDTH)[None], persistent=kept)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[:, : x.shape[1]]


class EncoderStack(nn.Module):
    """nn.TransformerEncoderLayer with a causal mask; embeddings times the root of the width."""

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
    """nn.MultiheadAttention in a block of its own, post-LN without a final norm, sines or halves
    that are nowhere in the file; without a mask where it is not `causal`."""

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


# Home-made ones.


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
