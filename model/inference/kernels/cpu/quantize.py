"""Quantize: a matrix in int8 with a scale for each row, or in int4 with a scale for every sixteen
weights.

Covers which integers and scales a matrix is rounded to and how they lie in memory: row after row,
for the kernels in native/dot.h, or int8 in strips, for those in native/strips.h. Models are rounded
by native/quantize.h (`round_matrix`), of which `quantized_matrix` is the plain twin; those of
quantized matrices are their methods `dequantized`. Does not say which matrices get which format
(`describe.py`).

Both are symmetric: a row's largest magnitude becomes 127 in int8. In int4 the number of the largest
magnitude among sixteen becomes -8, whichever sign it has, as in llama.cpp's q4_0: that sets their
scale, which is itself an integer times the scale of their row. So products are integers up to their
end, as those of int8 are.
"""

import ctypes
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.inference.kernels.cpu.structures import KINDS

Format = Literal["int8", "int8_strips", "int4"]
"""What a matrix is rounded to, and how that lies in memory."""

LARGEST = 127
STEP = 64
"""Weights that are multiplied at once; a row of int4, or of a strip, is padded with zeros to whole
steps."""
SIDE = 16
"""Rows of a register of a strip."""
STRIP_ROWS = 2 * SIDE
TOGETHER = 4
"""Columns of a row that lie side by side in a strip."""
BLOCK_STEPS = 4
"""Steps that scales are shared by; the last block of a row may have fewer."""
SCALES = 16
"""Of a block."""
LEAST, MOST = -8, 7
"""int4's range."""
MAX_ACTIVATION = 255
ROWS_AT_ONCE = 128
"""Of a matrix that is rounded, which are float32 beside it meanwhile: so few stay in a processor's
cache."""
SMALLEST = 1e-30
"""A scale where there is nothing to scale."""


@dataclass(frozen=True)
class Int8Matrix:
    """A matrix (rows, width): its integers, int8, a scale for each row, float32 (rows,), and what
    each row's integers sum to, int32 (rows,)."""

    stored: Tensor
    scale: Tensor
    row_sum: Tensor

    def dequantized(self) -> Tensor:
        """The matrix that is computed with, float32."""
        return self.stored.float() * self.scale[:, None]


@dataclass(frozen=True)
class Int8Strips:
    """A matrix (rows, width).

    stored   int8 (strips, steps, 2, STEP / TOGETHER, SIDE, TOGETHER), as native/int8_strips.h says:
             of rows first those of either half of a strip, of columns first the steps
    scale    of each row, float32 (rows,)
    row_sum  what each row's integers sum to, int32 (rows,)
    width    of the matrix that was quantized
    """

    stored: Tensor
    scale: Tensor
    row_sum: Tensor
    width: int

    def dequantized(self) -> Tensor:
        """The matrix that is computed with, float32, read from what is stored."""
        # (strips, halves, rows of a half, steps, lines, columns of a line)
        rows = self.stored.permute(0, 2, 4, 1, 3, 5)
        # (rows, width), with zeros behind both
        whole = rows.reshape(-1, self.stored.shape[1] * STEP)
        return whole[: len(self.scale), : self.width].float() * self.scale[:, None]


@dataclass(frozen=True)
class Int4Matrix:
    """A matrix (rows, width).

    stored   uint8 (rows, int4_row_bytes(width)), as `I4` of native/dot.h says
    scale    of each row, float32 (rows,)
    row_sum  what each row's integers times their scales sum to, int32 (rows,)
    width    of the matrix that was quantized
    """

    stored: Tensor
    scale: Tensor
    row_sum: Tensor
    width: int

    def dequantized(self) -> Tensor:
        """The matrix that is computed with, float32, read from what is stored."""
        parts = []
        for start, steps in _blocks(self.width):
            block = self.stored[:, start : start + SCALES + steps * STEP // 2]
            scales = block[:, :SCALES].view(torch.int8)
            pairs = block[:, SCALES:].view(len(block), steps, 1, STEP // 2)
            values = torch.cat((pairs & 15, pairs >> 4), dim=2).float() + LEAST
            parts.append((_by_scale(values.flatten(1)) * scales[:, None, :, None]).flatten(1))
        return torch.cat(parts, dim=1)[:, : self.width] * self.scale[:, None]


QuantizedMatrix = Int8Matrix | Int8Strips | Int4Matrix


def quantized_matrix(weight: Tensor, form: Format) -> QuantizedMatrix:
    """A matrix (rows, width) in one of the formats, in plain torch."""
    match form:
        case "int8":
            return int8_matrix(weight)
        case "int8_strips":
            return int8_strips(weight)
        case "int4":
            return int4_matrix(weight)


def round_matrix(
    library: ctypes.CDLL, weight: Tensor, form: Format, stored: Tensor
) -> QuantizedMatrix:
    """A matrix (rows, width) in one of the formats, and in its own memory what that stands for: the
    bits of `quantized_matrix`, some rows at a time, by the native code. Its integers are written
    to `stored`, zeros of `stored_shape`."""
    library.logitd_quantize.argtypes = (
        c_int32, c_void_p, *(c_int32,) * 3, *(c_void_p,) * 3
    )  # fmt: skip
    count, width = weight.shape
    scale, row_sum = torch.empty(count), torch.empty(count, dtype=torch.int32)
    together = STRIP_ROWS if form == "int8_strips" else 1  # rows of one of the parts of `stored`
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
                stored[start // together].data_ptr(),
                scale[rows].data_ptr(),
                row_sum[rows].data_ptr(),
            )
            weight[rows] = part
    match form:
        case "int8":
            return Int8Matrix(stored, scale, row_sum)
        case "int8_strips":
            return Int8Strips(stored, scale, row_sum, width)
        case "int4":
            return Int4Matrix(stored, scale, row_sum, width)


def stored_shape(weight: Tensor, form: Format) -> Tensor:
    """Without memory of its own, the integers of a matrix (rows, width) in one of the formats."""
    rows, width = weight.shape
    match form:
        case "int8":
            return torch.empty(rows, width, dtype=torch.int8, device="meta")
        case "int8_strips":
            shape = -(-rows // STRIP_ROWS), -(-width // STEP), 2, STEP // TOGETHER, SIDE, TOGETHER
            return torch.empty(shape, dtype=torch.int8, device="meta")
        case "int4":
            return torch.empty(rows, int4_row_bytes(width), dtype=torch.uint8, device="meta")


def int8_matrix(weight: Tensor) -> Int8Matrix:
    """The int8 form of a matrix (rows, width)."""
    with torch.no_grad():
        wide = weight.float()
        scale = wide.abs().amax(dim=1).clamp(min=SMALLEST) / LARGEST
        values = (wide / scale[:, None]).round().to(torch.int8)
        return Int8Matrix(values, scale, row_sum=values.sum(dim=1, dtype=torch.int32))


def int8_strips(weight: Tensor) -> Int8Strips:
    """The int8 form of a matrix (rows, width), in strips."""
    plain, (rows, width) = int8_matrix(weight), weight.shape
    whole = F.pad(plain.stored, (0, -width % STEP, 0, -rows % STRIP_ROWS))
    steps, lines = whole.shape[1] // STEP, STEP // TOGETHER
    strips = whole.view(-1, 2, SIDE, steps, lines, TOGETHER).permute(0, 3, 1, 4, 2, 5)
    return Int8Strips(strips.contiguous(), plain.scale, plain.row_sum, width)


def int4_matrix(weight: Tensor) -> Int4Matrix:
    """The int4 form of a matrix (rows, width)."""
    with torch.no_grad():
        rows, width = weight.shape
        padded = F.pad(weight.float(), (0, -width % STEP))
        blocks = [_by_scale(block) for block in padded.split(STEP * BLOCK_STEPS, dim=1)]
        mosts = [_signed_largest(block) for block in blocks]  # (rows, SCALES)
        largest = torch.cat(mosts, dim=1).abs().amax(dim=1) / -LEAST
        scale = largest.clamp(min=SMALLEST) / largest_scale(width)
        packed, row_sum = [], torch.zeros(rows, dtype=torch.int32)
        for block, most in zip(blocks, mosts, strict=True):
            steps = (most / LEAST / scale[:, None]).round()
            real = torch.where(steps == 0, torch.inf, steps * scale[:, None])
            values = (block / real[:, None, :, None]).round().clamp(LEAST, MOST)
            # Also where another number would be nearer to it, its scale having been rounded up: so
            # what is rounded once more has the same scales, and stays as it is.
            values = torch.where(block == most[:, None, :, None], LEAST, values)
            packed += [steps.to(torch.int8).view(torch.uint8), _nibbles(values.flatten(1))]
            row_sum += (values.sum(dim=(1, 3)) * steps).sum(dim=1).to(torch.int32)
        return Int4Matrix(torch.cat(packed, dim=1), scale, row_sum, width)


def largest_scale(width: int) -> int:
    """The largest integer that a row's scales may be: with it no sum of products, of which each is
    at most 255 times 8 times this, leaves 32 bits."""
    return min(LARGEST, (2**31 - 1) // (MAX_ACTIVATION * -LEAST * (width + -width % STEP)))


def int4_row_bytes(width: int) -> int:
    """Bytes of a row of int4 weights with its scales."""
    return sum(SCALES + steps * STEP // 2 for _, steps in _blocks(width))


def _blocks(width: int) -> list[tuple[int, int]]:
    """Of each block of a row: where its bytes begin, and its steps."""
    steps = -(-width // STEP)
    size = SCALES + BLOCK_STEPS * STEP // 2
    return [
        (size * (first // BLOCK_STEPS), min(BLOCK_STEPS, steps - first))
        for first in range(0, steps, BLOCK_STEPS)
    ]


def _by_scale(block: Tensor) -> Tensor:
    """From (rows, steps * STEP), in order, to (rows, 2 * steps, SCALES, 2): what shares a scale is
    a pair of neighbours in each half of every step."""
    return block.reshape(len(block), -1, SCALES, 2)


def _signed_largest(block: Tensor) -> Tensor:
    """Of what shares a scale, the number of the largest magnitude: (rows, SCALES)."""
    least, most = block.amin(dim=(1, 3)), block.amax(dim=(1, 3))
    return torch.where(-least > most, least, most)


def _nibbles(values: Tensor) -> Tensor:
    """Weights (rows, steps * STEP) from LEAST to MOST in four bits each: the first half of a step
    in the lower ones."""
    halves = (values - LEAST).to(torch.uint8).view(len(values), -1, 2, STEP // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
