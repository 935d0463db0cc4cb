"""Gates: sigmoids of a few leading channels of a vector, which scale embeddings of tokens.

Value embeddings (`Block.gated_value_embedding`) and `smear` use gates. The results of a row must
not depend on the other rows of the batch. On a CPU, the last bits of the results would depend on
the number of rows if gates used bfloat16, torch's sigmoid, or a matrix product this small. So gates
are computed in float32 or wider, with tanh, and with a sum instead of the matrix product.

Source: nanochat, after modded-nanogpt.
"""

import torch
from torch import Tensor

VALUE_GATE_WIDTH = 32
"""Number of leading channels of the residual stream that determine the gate of a value
embedding."""
SMEAR_WIDTH = 24
"""Number of leading channels of a token's embedding that determine the gate of `smear`."""


def leading_gate(x: Tensor, weight: Tensor) -> Tensor:
    """sigmoid(weight . leading channels) of vectors (B, T, C) and a weight (K, width): (B, T, K),
    in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # A copy: in a view of wider rows, the last bits also depend on the address of a row.
    leading = x[..., : weight.shape[1]].to(wide).contiguous()
    steer = (leading.unsqueeze(-2) * weight.to(wide)).sum(-1)  # (B, T, K)
    return (1 + torch.tanh(steer / 2)) / 2


def smear(
    x: Tensor,  # (B, T, C)
    before: Tensor,  # (B, T, C)
    positions: Tensor,  # (B, T)
    weight: Tensor,  # (1, width)
    scale: Tensor,  # (1,)
) -> Tensor:
    """Embeddings plus `scale` * gate * `before`, where `before` has the previous tokens'
    embeddings. Position 0 has no previous token."""
    gate = leading_gate(x, weight)  # (B, T, 1)
    part = (scale.to(gate.dtype) * gate).masked_fill(positions[..., None] == 0, 0.0)
    return x + part.to(x.dtype) * before
