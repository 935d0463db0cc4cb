"""Sizes of the textbook models, their random weights, and the few lines of attention.

Covers scores with a mask, sinusoidal and rotary positions and the root mean square.
"""

import math

import torch
from torch import Tensor, nn

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 29, 16, 32, 4, 2


def draw(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter so that it matters: attention is selective, norms and biases are far
    from their initial values."""
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


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with random weights, in evaluation mode and without gradients."""
    draw(model, seed)
    return model.eval().requires_grad_(False)


def split(x: Tensor, heads: int) -> Tensor:
    """Split the heads: (B, T, H * D) to (B, H, T, D)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """Join the heads: (B, H, T, D) to (B, T, H * D)."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, divisor: float, *, causal: bool = True) -> Tensor:
    """Causal attention over (..., T, D): each position attends to itself and to earlier
    positions."""
    scores = q @ k.mT / divisor
    if causal:
        later = torch.ones(q.shape[-2], k.shape[-2]).triu(1).bool()
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(dim=-1) @ v


def steps(ids: Tensor) -> Tensor:
    """Positions 0, 1, 2, ... of ids (B, T)."""
    return torch.arange(ids.shape[1])


def waves(length: int, width: int, *, halves: bool = False) -> Tensor:
    """Sinusoidal positions (length, width). Sines and cosines alternate; with `halves`, all sines
    come first."""
    table = torch.zeros(length, width, dtype=torch.float64)
    for position in range(length):
        for pair in range(width // 2):
            angle = position / 10_000.0 ** (2 * pair / width)
            sine, cosine = (pair, width // 2 + pair) if halves else (2 * pair, 2 * pair + 1)
            table[position, sine], table[position, cosine] = math.sin(angle), math.cos(angle)
    return table.float()


def turned(
    x: Tensor, *, neighbors: bool, backward: bool = False, theta: float = 10_000.0
) -> Tensor:
    """Apply rotary positions to (B, H, T, D), as products of complex numbers."""
    time, width = x.shape[-2:]
    rates = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(time, dtype=torch.float64), rates)  # (T, D / 2)
    turn = torch.polar(torch.ones_like(angles), -angles if backward else angles)
    if neighbors:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
    first, second = x.double().chunk(2, dim=-1)
    pairs = torch.complex(first, second) * turn
    return torch.cat((pairs.real, pairs.imag), dim=-1).to(x.dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square."""
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()
