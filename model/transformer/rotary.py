"""Rotary positions: queries and keys are rotated by angles that grow with the position.

This module computes the tables of cosines and sines, including the tables for partially rotated
heads and scaled angles, and applies them (`rotate`). The tables contain everything that a
`GPTConfig` says about rotary positions, so the forward pass, the KV cache and the native code need
only the tables. `model/transformer/gpt.py` has the learned and sinusoidal positions.

Sources: Su et al., RoFormer (2021); GPT-NeoX for partially rotated heads; for scaled angles the
formulas of transformers 5, `modeling_rope_utils`, after Chen et al. (2023, linear), Llama 3.1
(llama3) and Peng et al. (2023, yarn).

Shapes: D = head_dim, R = rotary_dim.
"""

import math

import torch
from torch import Tensor

from logitd.model.transformer.config import GPTConfig, RopeScaling

TABLE_ROWS = 4096
"""Number of positions whose angles are computed at a time."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels of x (B, heads, T, D) by angles whose cosines and sines are cos and
    sin (B, 1, T, D / 2). Channel i is paired with channel i + D / 2, as in Llama."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_tables(config: GPTConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """The cosines and sines (context_length, D / 2) of the angles at all positions.

    The first R / 2 pairs are rotated; with yarn scaling, their cosines and sines are multiplied by
    its attention factor. The other pairs have a cosine of exactly 1 and a sine of exactly 0.
    """
    turns = angles_per_position(config, device)
    scaling = config.rope_scaling
    factor = (scaling.attention_factor if scaling is not None else None) or 1.0
    turning = config.rotary_dim // 2
    cos = torch.ones(config.context_length, config.head_dim // 2, device=device)
    sin = torch.zeros(config.context_length, config.head_dim // 2, device=device)
    # All rows at once in float64 would take six times the memory of the tables.
    for start in range(0, config.context_length, TABLE_ROWS):
        rows = slice(start, min(start + TABLE_ROWS, config.context_length))
        positions = torch.arange(rows.start, rows.stop, device=device)
        angles = positions[:, None] * turns  # (rows, R / 2)
        cos[rows, :turning] = (factor * angles.cos()).float()
        sin[rows, :turning] = (factor * angles.sin()).float()
    return cos, sin


def angles_per_position(config: GPTConfig, device: torch.device) -> Tensor:
    """Growth of each rotated pair's angle per position (R / 2,), float64. Without scaling it is
    theta^(-2i / R)."""
    turning = config.rotary_dim
    channels = torch.arange(0, turning, 2, device=device, dtype=torch.float64) / turning
    angles = config.rope_theta**-channels
    scaling = config.rope_scaling
    if scaling is None:
        return angles
    match scaling.kind:
        case "linear":
            return angles / scaling.factor
        case "llama3":
            return _llama3(angles, scaling)
        case "yarn":
            return _yarn(angles, scaling, config)


def _llama3(angles: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale angles as in Llama 3.1. An angle that makes few turns within the original context is
    divided by the factor, and an angle that makes many turns does not change. The angles in between
    are interpolated."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_context_length
    assert low is not None
    assert high is not None
    assert original is not None
    turns = original * angles / (2 * math.pi)
    alone = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - alone) * angles / scaling.factor + alone * angles


def _yarn(angles: Tensor, scaling: RopeScaling, config: GPTConfig) -> Tensor:
    """Scale angles as in YaRN. As in `_llama3`, fast angles do not change and slow angles are
    divided by the factor. The angles in between are interpolated linearly by their index, from the
    angle that makes `beta_fast` turns within the original context to the angle that makes
    `beta_slow` turns."""
    fast, slow, original = scaling.beta_fast, scaling.beta_slow, scaling.original_context_length
    assert fast is not None
    assert slow is not None
    assert original is not None

    def index(turns: float) -> float:
        """The index of the angle that makes this many turns within the original context."""
        rotations = math.log(original / (turns * 2 * math.pi))
        return config.rotary_dim * rotations / (2 * math.log(config.rope_theta))

    first, last = index(fast), index(slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    if first == last:
        last += 0.001  # avoids a division by zero below
    indices = torch.arange(len(angles), device=angles.device, dtype=angles.dtype)
    stretched = ((indices - first) / (last - first)).clamp(0, 1)
    return stretched * angles / scaling.factor + (1 - stretched) * angles
