"""Computation: the parts of a GPT's computation that names and shapes do not fix.

Each field has a flag of the same name. `questions.py` lists the values that a file leaves open,
`resolve.py` chooses among them, `build.py` turns the result into a `GPTConfig` and its weights.
"""

from dataclasses import dataclass
from typing import Literal

from logitd.model.transformer.config import Activation, Norm, NormPosition, Residual

ScoreScale = Literal["head_dim", "d_model", "none"]
"""Width whose square root divides attention scores; "none" does not divide them."""
Positions = Literal["learned", "rotary", "sinusoidal", "sinusoidal_halves", "none"]
"""`sinusoidal_halves` has all sines first and then all cosines."""
RotaryLayout = Literal["half", "interleaved"]
"""Channels of a head that are rotated together: i and i + D / 2, or 2 i and 2 i + 1."""
QkvLayout = Literal["qkv", "kqv", "per_head"]
"""Rows of a fused matrix: all queries, keys, values; keys first; or query, key and value of each
head in turn."""
GateOrder = Literal["gate_first", "up_first"]
QkNorm = Literal["none", "learned", "unit"]
"""RMS norm of queries and keys: with weights of the file, or without weights."""
EmbeddingScale = Literal["one", "sqrt_d_model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """One way to compute with the tensors of a file.

    causal   a position sees itself and earlier ones; a model that sees all is refused
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
