"""Computation: the details of a GPT's computation that names and shapes of tensors leave open.

Each field has a flag of the same name. `questions.py` lists the values that are possible for a
file, `resolve.py` chooses among them, and `build.py` turns the result into a `GPTConfig` and its
weights.
"""

from dataclasses import dataclass
from typing import Literal

from logitd.model.transformer.config import Activation, Norm, NormPosition, Residual

ScoreScale = Literal["head_dim", "d_model", "none"]
"""Width by whose square root attention scores are divided; "none" does not divide them."""
Positions = Literal["learned", "rotary", "sinusoidal", "sinusoidal_halves", "none"]
"""With `sinusoidal_halves`, all sines come first, then all cosines."""
RotaryLayout = Literal["half", "interleaved"]
"""Channels of a head that are rotated together: i and i + D / 2, or 2 i and 2 i + 1."""
QkvLayout = Literal["qkv", "kqv", "per_head"]
"""Order of the rows in a fused matrix: queries, keys, values; or keys, queries, values; or query,
key and value head by head."""
GateOrder = Literal["gate_first", "up_first"]
QkNorm = Literal["none", "learned", "unit"]
"""RMS norm of queries and keys: none, with learned weights, or without weights."""
EmbeddingScale = Literal["one", "sqrt_d_model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """A possible computation with the tensors of a file.

    causal   positions attend only to themselves and earlier positions; other models are refused
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
    rope_theta: float
    activation: Activation
    score_scale: ScoreScale
    qkv_layout: QkvLayout
    gate_order: GateOrder
    qk_norm: QkNorm
    qk_norm_eps: float
    embedding_scale: EmbeddingScale
    causal: bool
