"""Computation: what a GPT computes with its tensors, as far as names and shapes do not fix it.

Each field has a flag of its own name. `questions.py` lists the values that a file leaves open,
`resolve.py` chooses among them, `build.py` turns the result into a `GPTConfig` and its weights.
"""

from dataclasses import dataclass
from typing import Literal

from logitd.model.transformer.config import Activation, Norm, NormPosition, Residual

ScoreScale = Literal["head_dim", "d_model", "none"]
"""What a query times a key is divided by: the square root of either width, or nothing."""
Positions = Literal["learned", "rotary", "sinusoidal", "sinusoidal_halves", "none"]
"""`sinusoidal_halves` has all sines first and then all cosines."""
RotaryLayout = Literal["half", "interleaved"]
"""Which channels of a head turn together: i and i + D / 2, or 2 i and 2 i + 1."""
QkvLayout = Literal["qkv", "kqv", "per_head"]
"""Rows of a fused matrix: all queries, keys, values; keys first; or for each head its own three."""
GateOrder = Literal["gate_first", "up_first"]
QkNorm = Literal["none", "learned", "unit"]
"""RMS norm of queries and keys: with weights of the file, or with none at all."""
EmbeddingScale = Literal["one", "sqrt_d_model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """One way to compute with the tensors of a file.

    causal   whether a position sees itself and what precedes; a model where it sees all is refused
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
