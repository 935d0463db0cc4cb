"""Compress: a matrix of bfloat16 in three quarters of its bytes, every bit of which comes back.

Covers making one by the native code (native/compressed.h, which says how it lies in memory and why
it is that small), and both ways back: the native one, and a plain one that reads the same bytes.
Does not say which matrices are kept so (`describe.py`), nor multiply them.
"""

import ctypes
from ctypes import byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from logitd.model.inference.kernels.cpu.structures import KINDS, Matrix

SIDE = 16
STEP = 32
"""Columns of a block, which has SIDE rows."""
STRIP_ROWS = 2 * SIDE
WEIGHTS = SIDE * STEP
"""Of a block: as many bytes of signs and fractions, and half as many of codes."""
BLOCK_BYTES = WEIGHTS * 3 // 2
LINE = 64
WORTH_IT = 0.9
"""Of a matrix's own bytes: one that takes more is not kept so."""


@dataclass(frozen=True)
class CompressedMatrix:
    """A matrix (rows, width): its strips, uint8 (bytes,), and where each of them begins and the
    last one ends, in lines, int32 (strips + 1,)."""

    stored: Tensor
    strips: Tensor
    rows: int
    width: int

    def decompressed(self) -> Tensor:
        """The matrix (rows, width), bfloat16, read from what is stored by plain torch."""
        steps = -(-self.width // STEP)
        starts = self.strips.tolist()
        strips = [
            _strip(self.stored[start * LINE : end * LINE], steps) for start, end in pairwise(starts)
        ]
        return torch.cat(strips)[: self.rows, : self.width].view(torch.bfloat16)

    def described(self) -> Matrix:
        """As the native code sees it, without a bias."""
        return Matrix(
            weights=self.stored.data_ptr(),
            strips=self.strips.data_ptr(),
            kind=KINDS["compressed"],
            rows=self.rows,
            width=self.width,
        )


def compress_matrix(library: ctypes.CDLL, weight: Tensor, room: Tensor) -> CompressedMatrix | None:
    """A matrix (rows, width) of bfloat16 at the beginning of `room`, uint8, which begins on a line.
    None where the library has no tiles, or it would take more than WORTH_IT."""
    library.logitd_compress.restype = c_int64
    library.logitd_compress.argtypes = (
        c_void_p, c_int32, c_int32, c_void_p, c_int64, c_void_p
    )  # fmt: skip
    rows, width = weight.shape
    strips = torch.empty(-(-rows // STRIP_ROWS) + 1, dtype=torch.int32)
    assert weight.dtype is torch.bfloat16
    assert weight.is_contiguous()
    used = library.logitd_compress(
        weight.data_ptr(),
        rows,
        width,
        room.data_ptr(),
        min(len(room), most_bytes(rows, width)),
        strips.data_ptr(),
    )
    return CompressedMatrix(room[:used], strips, rows, width) if used else None


def most_bytes(rows: int, width: int) -> int:
    """Bytes that a matrix takes at most where it is kept so."""
    return int(WORTH_IT * 2 * rows * width)


def decompress_matrix(library: ctypes.CDLL, matrix: CompressedMatrix, weight: Tensor) -> None:
    """Write a matrix back to a tensor (rows, width) of bfloat16, by the native code."""
    library.logitd_decompress.argtypes = (c_void_p, c_void_p)
    assert weight.dtype is torch.bfloat16
    assert weight.is_contiguous()
    library.logitd_decompress(byref(matrix.described()), weight.data_ptr())


def _strip(stored: Tensor, steps: int) -> Tensor:
    """The bits of the STRIP_ROWS rows of a strip, int16 (STRIP_ROWS, steps * STEP)."""
    blocks = 2 * steps
    heads = stored[: 2 * blocks].view(blocks, 2).int()  # the exponent below, escapes
    counts = heads[:, 1].long()
    escapes = stored[2 * blocks : 2 * blocks + 4 * int(counts.sum())].view(-1, 4).int()
    body = stored[-blocks * BLOCK_BYTES :].view(blocks, BLOCK_BYTES).int()
    others = body[:, :WEIGHTS]  # (blocks, WEIGHTS): sign and fraction
    pairs = body[:, WEIGHTS:].view(blocks, SIDE // 2, STEP)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)  # (blocks, WEIGHTS)
    exponents = torch.where(codes == 0, 0, codes + heads[:, :1])
    bits = (others & 128) << 8 | exponents << 7 | others & 127
    block = torch.arange(blocks).repeat_interleave(counts)
    place = escapes[:, 2] | escapes[:, 3] << 8
    bits[block, place.long()] = escapes[:, 0] | escapes[:, 1] << 8
    # A line has two columns of each row: (steps, halves, lines, rows, two) to (rows, columns).
    parts = bits.view(steps, 2, SIDE, SIDE, 2).permute(1, 3, 0, 2, 4)
    return parts.reshape(STRIP_ROWS, steps * STEP).to(torch.uint16).view(torch.int16)
