"""Every version of nanochat's model, with the names of its checkpoints.

Written from its definition for comparison: norms, rotation and attention are spelled out, and every
position is computed from the whole sequence. Training, caches and low precision are left out.
"""

import json
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Version:
    """Constants that differ between versions. `left` is the number of earlier positions in a short
    window if the sequence length is 256."""

    scales: bool = True
    values: bool = True
    smear: bool = True
    gate: float = 3.0
    gate_width: int = 12
    base: float = 100_000.0
    sharpness: float = 1.2
    left: int = 128


VERSIONS = {
    "October 2025": Version(False, False, False, 2.0, 32, 10_000.0, 1.0, 128),
    "11 January 2026": Version(True, False, False, 2.0, 32, 10_000.0, 1.0, 128),
    "17 January 2026": Version(True, True, False, 2.0, 32, 10_000.0, 1.0, 128),
    "9 March 2026": Version(True, True, False, 3.0, 12, 100_000.0, 1.15, 128),
    "14 March 2026": Version(),
}


SPECIAL = (
    *("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
)


@dataclass(frozen=True)
class Sizes:
    """The keys of `model_config`."""

    sequence_len: int = 256
    vocab_size: int = 300
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2
    n_embd: int = 48
    window_pattern: str = "SSL"


def unit(x: Tensor) -> Tensor:
    eps = torch.finfo(torch.float32).eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def backwards(x: Tensor, base: float) -> Tensor:
    """Rotate vectors (T, D) of positions 0 to T - 1 by the negative of their angles."""
    half = x.shape[1] // 2
    angles = torch.arange(len(x))[:, None] * base ** (-torch.arange(half) / half)
    pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(()), -angles)
    return torch.cat((pairs.real, pairs.imag), dim=1)


class Nanochat(nn.Module):
    def __init__(self, version: Version, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        self.version, self.sizes = version, sizes
        width, layers = sizes.n_embd, sizes.n_layer
        rows, keys = -(-sizes.vocab_size // 64) * 64, width // sizes.n_head * sizes.n_kv_head

        def matrix(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.gated = [n for n in range(layers) if version.values and (layers - 1 - n) % 2 == 0]
        blocks = []
        for layer in range(layers):
            attention = {"c_q": matrix(width, width), "c_k": matrix(width, keys),
                         "c_v": matrix(width, keys), "c_proj": matrix(width, width)}  # fmt: skip
            if layer in self.gated:
                attention["ve_gate"] = matrix(version.gate_width, sizes.n_kv_head)
            mlp = {"c_fc": matrix(width, 4 * width), "c_proj": matrix(4 * width, width)}
            parts = {"attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)}
            blocks.append(nn.ModuleDict(parts))
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(rows, width), "h": nn.ModuleList(blocks)}
        )
        self.lm_head = matrix(width, rows)
        if version.scales:
            self.resid_lambdas = nn.Parameter(torch.rand(layers) + 0.6)
            self.x0_lambdas = nn.Parameter(torch.rand(layers) - 0.3)
        if version.values:
            tables = {str(layer): nn.Embedding(rows, keys) for layer in self.gated}
            self.value_embeds = nn.ModuleDict(tables)
        if version.smear:
            self.smear_gate = matrix(24, 1)
            self.smear_lambda = nn.Parameter(torch.tensor([0.8]))
            self.backout_lambda = nn.Parameter(torch.tensor([0.3]))

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Logits (T, vocab_size) of one sequence of ids (T)."""
        version, layers = self.version, self.sizes.n_layer
        x = unit(self.transformer["wte"](ids))
        if version.smear:
            gates = self.smear_lambda * torch.sigmoid(self.smear_gate(x[1:, :24]))
            x = torch.stack([x[0], *(x[1:] + gates * x[:-1])])
        first, kept = x, x
        blocks: Any = self.transformer["h"]
        for layer in range(layers):
            if version.scales:
                x = self.resid_lambdas[layer] * x + self.x0_lambdas[layer] * first
            parts: Any = blocks[layer]
            x = x + self.attention(parts["attn"], layer, unit(x), ids)
            hidden = parts["mlp"]["c_fc"](unit(x)).clamp(min=0) ** 2
            x = x + parts["mlp"]["c_proj"](hidden)
            if layer == layers // 2:
                kept = x
        if version.smear:
            x = x - self.backout_lambda * kept
        return 15 * (self.lm_head(unit(x))[:, : self.sizes.vocab_size] / 15).tanh()

    def attention(self, parts: Any, layer: int, x: Tensor, ids: Tensor) -> Tensor:
        sizes, version = self.sizes, self.version
        width = sizes.n_embd // sizes.n_head
        values = parts["c_v"](x).view(len(x), sizes.n_kv_head, width)
        if layer in self.gated:
            gate = version.gate * torch.sigmoid(parts["ve_gate"](x[:, : version.gate_width]))
            values = values + gate[..., None] * self.value_embeds[str(layer)](ids).view_as(values)
        queries, keys = parts["c_q"](x).split(width, 1), parts["c_k"](x).split(width, 1)
        pattern = sizes.window_pattern
        short = pattern[layer % len(pattern)] == "S" and layer < sizes.n_layer - 1
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = (distance >= 0) & (distance <= (version.left if short else len(x)))
        out = []
        for head, query in enumerate(queries):
            shared = head * sizes.n_kv_head // sizes.n_head
            q, k = (
                version.sharpness * unit(backwards(each, version.base))
                for each in (query, keys[shared])
            )
            scores = (q @ k.T / width**0.5).masked_fill(~seen, float("-inf"))
            out.append(scores.softmax(-1) @ values[:, shared])
        return parts["c_proj"](torch.cat(out, dim=1))

    def meta(self, **more: Any) -> dict[str, Any]:
        """The contents of `meta_*.json`."""
        return {"step": 250, "val_bpb": 0.9, "total_batch_size": 1024,
                "model_config": asdict(self.sizes), **more}  # fmt: skip


def save(folder: Path, model: Nanochat, step: int = 250, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / f"model_{step:06d}.pt")
    meta = {**model.meta(), **changes}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    return folder


def small(version: str = "14 March 2026", **sizes: Any) -> Nanochat:
    torch.manual_seed(4)
    model = Nanochat(VERSIONS[version], Sizes(**sizes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model


def save_vocabulary(base: Path) -> tiktoken.Encoding:
    """Save a vocabulary of 267 ids to the place where nanochat saves its own."""
    encoding = tiktoken.Encoding(
        "rustbpe",
        pat_str=r"\p{L}+|\p{N}{1,2}|\s+|[^\s\p{L}\p{N}]+",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)} | {b"he": 256, b"hel": 257},
        special_tokens={name: 258 + index for index, name in enumerate(SPECIAL)},
    )
    (base / "tokenizer").mkdir(parents=True)
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    return encoding
