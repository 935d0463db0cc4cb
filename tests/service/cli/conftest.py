"""An empty working directory for tests of the command line."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, which has no .env."""
    monkeypatch.chdir(tmp_path)
