"""Compress: stores bfloat16 matrices at three quarters of their size, without loss.

Calls native/compressed.h, which describes the layout and explains its size. `describe.py` chooses
the matrices.
"""

import ctypes
from ctypes import byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from logitd.model.inference.kernels.cpu.structures import KINDS, Matrix

SIDE, STEP = 16, 32
"""Rows and columns of a block."""
STRIP_ROWS = 2 * SIDE
WORTH_IT = 0.9
"""A matrix is stored compressed only if its size shrinks to at most this fraction."""


@dataclass(frozen=True)
class CompressedMatrix:
    """A compressed matrix (rows, width). `stored` holds its strips, uint8 (bytes,). `strips` holds
    the index of each strip's first cache line, and the end of the last strip, int32 (strips +
    1,)."""

    stored: Tensor
    strips: Tensor
    rows: int
    width: int

    def described(self) -> Matrix:
        """The structure that describes the matrix to the native code, without a bias."""
        return Matrix(
            weights=self.stored.data_ptr(),
            strips=self.strips.data_ptr(),
            kind=KINDS["compressed"],
            rows=self.rows,
            width=self.width,
        )


def compress_matrix(library: ctypes.CDLL, weight: Tensor, room: Tensor) -> CompressedMatrix | None:
    """Compress a bfloat16 matrix (rows, width) into the beginning of `room` (uint8, aligned to a
    cache line). Returns None if the library has no AMX tiles, or if the result would exceed
    WORTH_IT."""
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
    """Largest size of a compressed matrix, in bytes."""
    return int(WORTH_IT * 2 * rows * width)


def decompress_matrix(library: ctypes.CDLL, matrix: CompressedMatrix, weight: Tensor) -> None:
    """Decompress a matrix into the bfloat16 tensor `weight` (rows, width)."""
    library.logitd_decompress.argtypes = (c_void_p, c_void_p)
    assert weight.dtype is torch.bfloat16
    assert weight.is_contiguous()
    library.logitd_decompress(byref(matrix.described()), weight.data_ptr())
