"""A checkpoint for a single test."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def saved(checkpoint_path: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, which the test may damage."""
    return Path(shutil.copytree(checkpoint_path, tmp_path / "tiny"))
