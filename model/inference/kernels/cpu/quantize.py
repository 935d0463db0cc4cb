"""Quantize: converts matrices to int8 with a scale for each row, or to int4 with a scale for every
16 weights.

This module defines the formats, their layout in memory for native/dot.h and
native/int8_strips.h, and the conversion back to weights. native/quantize.h does the rounding.
`describe.py` chooses the format of each matrix.

Both formats are symmetric. In int8 the largest magnitude of a row becomes 127. In int4 sixteen
weights share a scale: the one with the largest magnitude becomes -8 whatever its sign, as in
llama.cpp's q4_0. The shared scale is itself an integer times the scale of the row. So sums of
products stay integers until the end, as in int8.
"""

import ctypes
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from logitd.model.inference.kernels.cpu.structures import KINDS

Format = Literal["int8", "int8_strips", "int4"]
"""A quantized format: the integers to which a matrix is rounded, and their layout in memory."""

LARGEST = 127
STEP = 64
"""Number of weights of a row that one step of a product multiplies. Rows of int4 and of strips are
padded with zeros to whole steps."""
SIDE = 16
"""Number of rows of a strip that one register holds."""
STRIP_ROWS = 2 * SIDE
TOGETHER = 4
"""Number of columns of a row that are adjacent in a strip."""
BLOCK_STEPS = 4
"""Number of steps in a block. The steps of a block share scales. The last block of a row may have
fewer steps."""
SCALES = 16
"""Number of scales in a block."""
LEAST = -8
"""Smallest integer of int4; the largest is 7."""
MAX_ACTIVATION = 255
ROWS_AT_ONCE = 128
"""Rows rounded per call: few enough for their float32 copy to stay in a processor's cache."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (rows, width).

    stored   the integers:
             int8         int8 (rows, width)
             int8_strips  int8 (strips, steps, 2, STEP / TOGETHER, SIDE, TOGETHER), the layout of
                          native/int8_strips.h. The last four axes are the half of the strip, the
                          group of columns, the row and the column
             int4         uint8 (rows, int4_row_bytes(width)), the layout of `I4` in native/dot.h
    scale    float32 (rows,)
    row_sum  int32 (rows,): the sum of each row's integers; in int4, of integers times their scales
    """

    form: Format
    stored: Tensor
    scale: Tensor
    row_sum: Tensor
    width: int

    def dequantized(self) -> Tensor:
        """The rounded matrix in float32."""
        match self.form:
            case "int8":
                integers = self.stored.float()
            case "int8_strips":
                # (strips, halves, rows of a half, steps, groups, columns of a group)
                rows = self.stored.permute(0, 2, 4, 1, 3, 5)
                padded = rows.reshape(-1, self.stored.shape[1] * STEP)
                integers = padded[: len(self.scale), : self.width].float()
            case "int4":
                integers = _scaled_int4(self.stored, self.width)
        return integers * self.scale[:, None]


def _scaled_int4(stored: Tensor, width: int) -> Tensor:
    """The integers of an int4 matrix times their integer scales, as float32 (rows, width)."""
    parts = []
    for start, steps in int4_blocks(width):
        block = stored[:, start : start + SCALES + steps * STEP // 2]
        scales = block[:, :SCALES].view(torch.int8)
        pairs = block[:, SCALES:].view(len(block), steps, 1, STEP // 2)
        values = torch.cat((pairs & 15, pairs >> 4), dim=2).float() + LEAST
        parts.append((by_scale(values.flatten(1)) * scales[:, None, :, None]).flatten(1))
    return torch.cat(parts, dim=1)[:, :width]


def round_matrix(
    library: ctypes.CDLL, weight: Tensor, form: Format, stored: Tensor
) -> QuantizedMatrix:
    """Round a matrix (rows, width) in place to the values of a format, in native code. Writes the
    integers to `stored`, which must have the shape and dtype of `stored_shape` and be filled with
    zeros."""
    library.logitd_quantize.argtypes = (
        c_int32, c_void_p, *(c_int32,) * 3, *(c_void_p,) * 3
    )  # fmt: skip
    count, width = weight.shape
    scale, row_sum = torch.empty(count), torch.empty(count, dtype=torch.int32)
    stored_rows = STRIP_ROWS if form == "int8_strips" else 1  # rows of the matrix in a `stored` row
    with torch.no_grad():
        for start in range(0, count, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            part = weight[rows].float().contiguous()
            library.logitd_quantize(
                KINDS[form],
                part.data_ptr(),
                len(part),
                width,
                largest_scale(width),
                stored[start // stored_rows].data_ptr(),
                scale[rows].data_ptr(),
                row_sum[rows].data_ptr(),
            )
            weight[rows] = part
    return QuantizedMatrix(form, stored, scale, row_sum, width)


def stored_shape(weight: Tensor, form: Format) -> Tensor:
    """A tensor on the meta device with the shape and dtype of `QuantizedMatrix.stored`."""
    rows, width = weight.shape
    match form:
        case "int8":
            return torch.empty(rows, width, dtype=torch.int8, device="meta")
        case "int8_strips":
            shape = -(-rows // STRIP_ROWS), -(-width // STEP), 2, STEP // TOGETHER, SIDE, TOGETHER
            return torch.empty(shape, dtype=torch.int8, device="meta")
        case "int4":
            return torch.empty(rows, int4_row_bytes(width), dtype=torch.uint8, device="meta")


def largest_scale(width: int) -> int:
    """Largest integer scale in int4. With this scale a sum of products fits into 32 bits: each
    product is at most 255 times 8 times the scale."""
    return min(LARGEST, (2**31 - 1) // (MAX_ACTIVATION * -LEAST * (width + -width % STEP)))


def int4_row_bytes(width: int) -> int:
    """Bytes of a row of int4 weights, including its scales."""
    return sum(SCALES + steps * STEP // 2 for _, steps in int4_blocks(width))


def int4_blocks(width: int) -> list[tuple[int, int]]:
    """The first byte and the number of steps of each block of a row."""
    steps = -(-width // STEP)
    size = SCALES + BLOCK_STEPS * STEP // 2
    return [
        (size * (first // BLOCK_STEPS), min(BLOCK_STEPS, steps - first))
        for first in range(0, steps, BLOCK_STEPS)
    ]


def by_scale(block: Tensor) -> Tensor:
    """View (rows, steps * STEP) as (rows, 2 * steps, SCALES, 2). In each half of a step, every pair
    of adjacent columns has its own scale; the steps of a block share scales."""
    return block.reshape(len(block), -1, SCALES, 2)
