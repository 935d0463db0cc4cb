"""Computation: the details of a GPT's computation that names and shapes do not determine.

Each field has a flag of the same name. `questions.py` finds the possible values of the fields for a
file, `resolve.py` chooses among them, and `build.py` turns the result into a `GPTConfig` and its
weights.
"""

from dataclasses import dataclass
from typing import Literal

from logitd.model.transformer.config import Norm, NormPosition, Residual

Activation = Literal["gelu_tanh", "gelu", "relu", "relu2", "silu", "swiglu"]
"""An activation of a GPTConfig, or "silu", the SiLU without a gate."""
ScoreScale = Literal["head_dim", "d_model", "none"]
"""Attention scores are divided by the square root of this width. With "none", they are not
divided."""
Positions = Literal["learned", "rotary", "sinusoidal", "sinusoidal_halves", "none"]
"""The kinds of position encoding. In a table of type "sinusoidal_halves", the sines fill the
first half of the channels and the cosines fill the second half."""
RotaryLayout = Literal["half", "interleaved"]
"""Which channels of a head (of width D) are rotated together: i and i + D / 2, or 2i and 2i + 1."""
RotaryDirection = Literal["forward", "backward"]
"""Direction of the rotation. Forward multiplies a pair, as a complex number, by exp(i * angle);
backward multiplies it by exp(-i * angle), as in nanochat and modded-nanogpt."""
QkvLayout = Literal["qkv", "kqv", "per_head"]
"""Order of the rows in a fused matrix: queries, keys, values; or keys, queries, values; or head by
head, with the query, key and value of each head together."""
GateOrder = Literal["gate_first", "up_first"]
QkNorm = Literal["none", "learned", "unit"]
"""RMS norm of queries and keys: none, with learned weights, or without weights."""
QkNormPosition = Literal["before_rotary", "after_rotary"]
"""Whether queries and keys are normalized before or after positions rotate them. The order changes
the result only if the norms' weights differ between channels; then "after_rotary" is refused."""
EmbeddingScale = Literal["one", "sqrt_d_model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """One of the computations that are possible with a file's tensors.

    causal   each position attends only to itself and earlier positions; non-causal models are
             refused
    """

    n_head: int
    context_length: int
    norm: Norm
    norm_eps: float
    norm_position: NormPosition
    final_norm: bool
    residual: Residual
    positions: Positions
    rotary_layout: RotaryLayout
    rotary_direction: RotaryDirection
    rope_theta: float
    activation: Activation
    score_scale: ScoreScale
    qkv_layout: QkvLayout
    gate_order: GateOrder
    qk_norm: QkNorm
    qk_norm_eps: float
    qk_norm_position: QkNormPosition
    embedding_scale: EmbeddingScale
    causal: bool
