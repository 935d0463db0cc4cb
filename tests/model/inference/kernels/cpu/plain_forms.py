"""Rounded and compressed matrices in plain torch, as references for native/quantize.h and the
reader in native/compressed.h."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.inference.kernels.cpu import compress
from logitd.model.inference.kernels.cpu.compress import CompressedMatrix
from logitd.model.inference.kernels.cpu.quantize import (
    BLOCK_STEPS,
    LARGEST,
    LEAST,
    SIDE,
    STEP,
    STRIP_ROWS,
    TOGETHER,
    Format,
    QuantizedMatrix,
    by_scale,
    largest_scale,
)

SMALLEST = 1e-30
"""Scale of a row of zeros."""


def quantized_matrix(weight: Tensor, form: Format) -> QuantizedMatrix:
    """A matrix (rows, width) in one of the formats."""
    with torch.no_grad():
        return int4_matrix(weight) if form == "int4" else int8_matrix(weight, form)


def int8_matrix(weight: Tensor, form: Format) -> QuantizedMatrix:
    rows, width = weight.shape
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=SMALLEST) / LARGEST
    stored = (wide / scale[:, None]).round().to(torch.int8)
    row_sum = stored.sum(dim=1, dtype=torch.int32)
    if form == "int8_strips":
        padded = F.pad(stored, (0, -width % STEP, 0, -rows % STRIP_ROWS))
        steps, lines = padded.shape[1] // STEP, STEP // TOGETHER
        strips = padded.view(-1, 2, SIDE, steps, lines, TOGETHER)
        stored = strips.permute(0, 3, 1, 4, 2, 5).contiguous()
    return QuantizedMatrix(form, stored, scale, row_sum, width)


def int4_matrix(weight: Tensor) -> QuantizedMatrix:
    rows, width = weight.shape
    padded = F.pad(weight.float(), (0, -width % STEP))
    blocks = [by_scale(block) for block in padded.split(STEP * BLOCK_STEPS, dim=1)]
    mosts = [signed_largest(block) for block in blocks]  # (rows, SCALES)
    largest = torch.cat(mosts, dim=1).abs().amax(dim=1) / -LEAST
    scale = largest.clamp(min=SMALLEST) / largest_scale(width)
    packed, row_sum = [], torch.zeros(rows, dtype=torch.int32)
    for block, most in zip(blocks, mosts, strict=True):
        steps = (most / LEAST / scale[:, None]).round()
        real = torch.where(steps == 0, torch.inf, steps * scale[:, None])
        values = (block / real[:, None, :, None]).round().clamp(LEAST, 7)
        # The largest stays -8 even if its scale was rounded up and another integer is nearer:
        # then a matrix that is rounded again has the same scales and does not change.
        values = torch.where(block == most[:, None, :, None], LEAST, values)
        packed += [steps.to(torch.int8).view(torch.uint8), nibbles(values.flatten(1))]
        row_sum += (values.sum(dim=(1, 3)) * steps).sum(dim=1).to(torch.int32)
    return QuantizedMatrix("int4", torch.cat(packed, dim=1), scale, row_sum, width)


def signed_largest(block: Tensor) -> Tensor:
    """The value with the largest magnitude for each scale: (rows, SCALES)."""
    least, most = block.amin(dim=(1, 3)), block.amax(dim=(1, 3))
    return torch.where(-least > most, least, most)


def nibbles(values: Tensor) -> Tensor:
    """Pack weights (rows, steps * STEP) into four bits each. The first half of a step goes into the
    lower four bits of each byte."""
    halves = (values - LEAST).to(torch.uint8).view(len(values), -1, 2, STEP // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def decompressed(matrix: CompressedMatrix) -> Tensor:
    """The matrix (rows, width), bfloat16, read from the stored bytes."""
    steps, line = -(-matrix.width // compress.STEP), 64
    strips = [
        strip_bits(matrix.stored[start * line : end * line], steps)
        for start, end in pairwise(matrix.strips.tolist())
    ]
    return torch.cat(strips)[: matrix.rows, : matrix.width].view(torch.bfloat16)


def strip_bits(stored: Tensor, steps: int) -> Tensor:
    """The bits of a strip's rows, int16 (STRIP_ROWS, steps * STEP)."""
    step, side, weights = compress.STEP, compress.SIDE, compress.SIDE * compress.STEP
    blocks, block_bytes = 2 * steps, weights * 3 // 2  # sign and fraction, then half a byte of code
    heads = stored[: 2 * blocks].view(blocks, 2).int()  # the exponent below, escapes
    counts = heads[:, 1].long()
    escapes = stored[2 * blocks : 2 * blocks + 4 * int(counts.sum())].view(-1, 4).int()
    body = stored[-blocks * block_bytes :].view(blocks, block_bytes).int()
    others = body[:, :weights]  # sign and fraction
    pairs = body[:, weights:].view(blocks, side // 2, step)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)  # (blocks, weights)
    exponents = torch.where(codes == 0, 0, codes + heads[:, :1])
    bits = (others & 128) << 8 | exponents << 7 | others & 127
    block = torch.arange(blocks).repeat_interleave(counts)
    place = escapes[:, 2] | escapes[:, 3] << 8
    bits[block, place.long()] = escapes[:, 0] | escapes[:, 1] << 8
    # A line has two columns of each row: (steps, halves, lines, rows, two) to (rows, columns).
    parts = bits.view(steps, 2, side, side, 2).permute(1, 3, 0, 2, 4)
    return parts.reshape(2 * side, steps * step).to(torch.uint16).view(torch.int16)
