"""Atomic folder: written under another name, synced and renamed, so that it is complete or absent.

Knows nothing of the contents (`model/checkpoint/checkpoint.py`, `model/checkpoint/adapter.py`).
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to write files into, which becomes `path` when the block ends in peace, and
    disappears otherwise. `path` must not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield aside
        for file in aside.iterdir():
            _sync(file)
        aside.chmod(0o755)  # mkdtemp made it private
        _sync(aside)
        aside.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    """Flush a file or a directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
