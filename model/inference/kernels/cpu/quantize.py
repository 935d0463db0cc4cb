"""Quantize: int8 weights, a scale per row.

Symmetric: a row's largest magnitude becomes 127. The plain twin of a quantized matrix is
`Quantized.dequantized`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 127


@dataclass(frozen=True)
class Quantized:
    """A matrix (rows, width): values int8, scale float32 (rows,), and what each row's integers sum
    to, int32 (rows,)."""

    values: Tensor
    scale: Tensor
    row_sum: Tensor

    def dequantized(self) -> Tensor:
        """The matrix that is computed with, float32."""
        return self.values.float() * self.scale[:, None]


@torch.no_grad()
def quantize_rows(weight: Tensor) -> Quantized:
    """The int8 form of a matrix (rows, width)."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=1e-30) / LARGEST
    values = (wide / scale[:, None]).round().to(torch.int8)
    return Quantized(values, scale, row_sum=values.sum(dim=1, dtype=torch.int32))
