"""A checkpoint to be damaged."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def saved(checkpoint_path: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own, to be damaged."""
    return Path(shutil.copytree(checkpoint_path, tmp_path / "tiny"))
