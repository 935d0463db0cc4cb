"""Folders that are there are whole."""

import os
from pathlib import Path

import pytest

from logitd.model.checkpoint.atomic_folder import atomic_folder


def test_folder_appears_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with atomic_folder(path) as aside:
        (aside / "file").write_text("x")
        assert not path.exists()
    assert (path / "file").read_text() == "x"
    assert os.stat(path).st_mode & 0o777 == 0o755
    assert [each.name for each in path.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("error", [OSError("full"), SystemExit(1)])
def test_failed_folder_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "b") as aside:
            (aside / "file").write_text("x")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert list(tmp_path.iterdir()) == []
