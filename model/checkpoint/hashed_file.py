"""Hashed file: reads a file once, from beginning to end, and hashes it at the same time.

The hash is computed from the bytes in memory that the reader gets, so even if the file changes, the
reader gets no unhashed bytes. A thread hashes a piece while the reader works on it or takes the
next piece. At most two pieces are in memory.
"""

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from itertools import cycle
from pathlib import Path
from typing import Self

from logitd.model.files import open_regular

PIECE = 4 * 2**20
"""Size of a piece in bytes; it fits into the processor's cache."""


class HashedFile:
    """An open file; use it in a `with` block. Only the last two pieces taken are valid: `take`
    reuses the memory of the pieces before them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)
        self.size = os.fstat(self._file.fileno()).st_size  # bytes when it was opened
        self.taken = 0  # bytes read so far
        self._sha256 = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="logitd-hash")
        self._memory = cycle([memoryview(bytearray(PIECE)) for _ in range(2)])
        self._unhashed: deque[Future[None]] = deque()  # of at most two pieces

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._file.close()

    def take(self, count: int) -> memoryview:
        """The next `count` bytes, but at most PIECE; fewer at the end of the file."""
        if len(self._unhashed) == 2:
            self._unhashed.popleft().result()  # frees the piece before the previous one
        memory, count, filled = next(self._memory), min(count, PIECE), 0
        while filled < count and (more := self._file.readinto(memory[filled:count])):
            filled += more
        piece = memory[:filled]
        self._unhashed.append(self._thread.submit(self._sha256.update, piece))
        self.taken += filled
        return piece

    def take_all(self, count: int) -> bytes:
        """A copy of the next `count` bytes; fewer at the end of the file."""
        whole = bytearray()
        while len(whole) < count and (piece := self.take(count - len(whole))):
            whole += piece
        return bytes(whole)

    def another(self) -> FileIO:
        """A second descriptor of this file. It stays open after this object is closed, and refers
        to the hashed file even if the file at `path` is replaced."""
        return os.fdopen(os.dup(self._file.fileno()), "rb", buffering=0)

    def finish(self) -> str:
        """Read to the end of the file, and return its sha256."""
        while self.take(PIECE):
            pass
        while self._unhashed:
            self._unhashed.popleft().result()
        return self._sha256.hexdigest()
