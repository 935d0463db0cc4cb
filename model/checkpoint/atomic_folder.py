"""Atomic folder: written under another name, synced and renamed, so that it is complete or absent.

Knows nothing of the contents (`model/checkpoint/checkpoint.py`, `model/checkpoint/adapter.py`).
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from logitd.model.files import folder_aside, share_files


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to write files into, which becomes `path` when the block ends in peace, and
    disappears otherwise; its files are readable as the umask says. `path` must not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = folder_aside(path)
    try:
        yield aside
        share_files(aside)
        for file in aside.iterdir():
            _sync(file)
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
