"""Hashed file: a file that is read once, front to back, and hashed on its way.

What is hashed are the bytes in memory that the reader is given: a file that changes meanwhile, or
later, cannot give bytes that the hash does not tell of. A thread hashes a piece while the reader
works with it and takes the next one; two pieces are in memory at a time. Does not know what the
bytes mean, and trusts no length that they tell.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from logitd.model.files import open_regular

PIECE = 4 * 2**20
"""Bytes at a time: few enough for the processor's cache."""


class HashedFile:
    """A file that is open to be read from its beginning to its end, to be closed by `with`.

    A piece is memory that is written again when the next but one is taken.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
        self.size = os.fstat(self._file.fileno()).st_size
        """Bytes that the file had when it was opened."""
        self._sha256 = hashlib.sha256()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="logitd-hash")
        self._pieces = [_Piece(), _Piece()]
        self.taken = 0
        """Bytes that were read so far."""

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hashing.shutdown()
        self._file.close()

    def take(self, count: int) -> memoryview:
        """The next `count` bytes, PIECE at most; fewer where the file ends."""
        piece = self._pieces[0]
        self._pieces.reverse()
        found = piece.fill(self._read_into, min(count, PIECE))
        piece.in_use = self._hashing.submit(self._sha256.update, found)
        self.taken += len(found)
        return found

    def take_all(self, count: int) -> bytes:
        """A copy of the next `count` bytes, however many; fewer where the file ends."""
        whole = bytearray()
        while len(whole) < count and (piece := self.take(count - len(whole))):
            whole += piece
        return bytes(whole)

    def _read_into(self, memory: memoryview) -> int | None:
        return self._file.readinto(memory)  # type: ignore[attr-defined]

    def finish(self) -> str:
        """Read on to the end; the sha256 of the whole file."""
        while self.take(PIECE):
            pass
        for piece in self._pieces:
            piece.wait()
        return self._sha256.hexdigest()


class _Piece:
    """Memory for a piece, and who still reads it."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(PIECE))
        self.in_use: Future[None] | None = None

    def wait(self) -> None:
        """Until what the memory holds was hashed."""
        if self.in_use is not None:
            self.in_use.result()

    def fill(self, read_into: Callable[[memoryview], int | None], count: int) -> memoryview:
        """The memory's first `count` bytes, read anew; fewer where there are no more."""
        self.wait()
        filled = 0
        while filled < count and (more := read_into(self._memory[filled:count])):
            filled += more
        return self._memory[:filled]
