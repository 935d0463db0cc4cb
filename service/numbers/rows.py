"""Rows: pieces of logits from the engine, as an async iterator and as bytes of a reply.

A full-vocabulary reply is never held whole: pieces are written as they are computed, and the
engine computes the next ones only as these are taken.
"""

from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt

from model.engine.api import FinishEvent, RowsEvent
from service.async_engine import EngineStopped, Submission
from service.errors import from_finish, unavailable


async def read_rows(submission: Submission) -> AsyncIterator[RowsEvent]:
    """The pieces of each LogitsRequest in the order of their positions.

    Raises ApiError when a request ended before its last row.
    """
    while not submission.finished:
        try:
            events = await submission.take()
        except EngineStopped as error:
            raise unavailable(str(error)) from error
        for event in events:
            if isinstance(event, RowsEvent):
                yield event
            elif isinstance(event, FinishEvent) and (failure := from_finish(event)) is not None:
                raise failure


def npy_header(shape: tuple[int, int], dtype: np.dtype[np.floating]) -> bytes:
    """The header of an .npy file (format version 1.0) of rows that follow in C order."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    padding = -(10 + len(text) + 1) % 64
    header = text + " " * padding + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin-1")


def as_dtype(rows: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.floating]:
    """Rows in the numbers asked for, contiguous; float32 is what the engine gives."""
    return np.ascontiguousarray(rows, dtype=dtype)
