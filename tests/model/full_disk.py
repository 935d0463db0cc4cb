"""A temporarily full disk: the system limits every file to a number of bytes.

The limit stands in for a small file system, which only root could mount. Python ignores the signal
that comes with the limit, so a write fails with EFBIG instead of ENOSPC.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit every file to `size` bytes in this block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
