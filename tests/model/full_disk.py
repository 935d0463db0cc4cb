"""A disk that is full, for a while: the system takes no more than so many bytes of any one file.

As good as a small file system, and every user may have it. Python ignores the signal that comes
along, so that a write fails with EFBIG, as one without room does with ENOSPC.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes in this block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
