"""Rotary positions: queries and keys are turned by angles that grow with the position.

Covers the tables of cosines and sines, with a part of each head that does not turn and with scaled
angles, and their use (`rotate`). All that a `GPTConfig` says about rotary positions ends in the
tables: forward, KV cache, native code and recorded steps read them and know nothing else. Does not
cover learned and sinusoidal positions (`model/transformer/gpt.py`).

Sources: Su et al., RoFormer (2021); GPT-NeoX for heads of which a part turns; for scaled angles the
formulas of transformers 5, `modeling_rope_utils`, which are those of Chen et al. (2023, linear),
Llama 3.1 (llama3) and Peng et al. (2023, yarn).

Shapes: D = head_dim, R = rotary_dim.
"""

import math

import torch
from torch import Tensor

from logitd.model.transformer.config import GPTConfig, RopeScaling

TABLE_ROWS = 4096
"""Positions whose angles are computed at a time."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of channels, in the half-split layout of Llama: channel i is paired with channel
    i + D / 2. x (B, heads, T, D); cos, sin (B, 1, T, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_tables(config: GPTConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (context_length, D / 2) of the angles of all positions.

    Those of the first R / 2 pairs, times yarn's attention factor; the other pairs do not turn, and
    have a cosine of exactly 1 and a sine of exactly 0.
    """
    turns = angles_per_position(config, device)
    scaling = config.rope_scaling
    factor = (scaling.attention_factor if scaling is not None else None) or 1.0
    turning = config.rotary_dim // 2
    cos = torch.ones(config.context_length, config.head_dim // 2, device=device)
    sin = torch.zeros(config.context_length, config.head_dim // 2, device=device)
    # In float64, but never all of them at once: that is six times the memory of the tables.
    for start in range(0, config.context_length, TABLE_ROWS):
        rows = slice(start, min(start + TABLE_ROWS, config.context_length))
        positions = torch.arange(rows.start, rows.stop, device=device)
        angles = positions[:, None] * turns  # (rows, R / 2)
        cos[rows, :turning] = (factor * angles.cos()).float()
        sin[rows, :turning] = (factor * angles.sin()).float()
    return cos, sin


def angles_per_position(config: GPTConfig, device: torch.device) -> Tensor:
    """By how much each pair that turns does so from one position to the next: (R / 2,), float64;
    unscaled theta^(-2i / R)."""
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
    """Channels that turn rarely within the original context are divided by the factor, those that
    turn often are left alone, and between both it is a mean."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_context_length
    assert low is not None
    assert high is not None
    assert original is not None
    turns = original * angles / (2 * math.pi)
    alone = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - alone) * angles / scaling.factor + alone * angles


def _yarn(angles: Tensor, scaling: RopeScaling, config: GPTConfig) -> Tensor:
    """The same with a ramp over the channels' indices, between those that turn `beta_fast` and
    `beta_slow` times within the original context."""
    fast, slow, original = scaling.beta_fast, scaling.beta_slow, scaling.original_context_length
    assert fast is not None
    assert slow is not None
    assert original is not None

    def index(turns: float) -> float:
        """Of the channel that turns so often."""
        rotations = math.log(original / (turns * 2 * math.pi))
        return config.rotary_dim * rotations / (2 * math.log(config.rope_theta))

    first, last = index(fast), index(slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    if first == last:
        last += 0.001  # a step, not a division by zero
    indices = torch.arange(len(angles), device=angles.device, dtype=angles.dtype)
    stretched = ((indices - first) / (last - first)).clamp(0, 1)
    return stretched * angles / scaling.factor + (1 - stretched) * angles
