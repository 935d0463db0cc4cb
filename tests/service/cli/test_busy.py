"""The notice that other programs keep the machine busy."""

import os
from pathlib import Path

import pytest

from logitd.service.cli.busy import busy_notice


@pytest.mark.parametrize(
    ("content", "busy"),
    [
        ("9.41 5.00 2.00 11/171 7776", True),
        ("0.40 0.20 0.10 1/171 7776", False),
        ("9.41 5.00 2.00 1/171 7776", False),  # a command that has just ended
        ("0.40 0.20 0.10 11/171 7776", False),  # a burst of some milliseconds
        ("1.02 0.20 0.10 2/171 7776", True),  # one other program on two processors
        ("no numbers", False),
    ],
)
def test_busy_notice_needs_load_over_a_minute_and_now(
    content: str, busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    file = tmp_path / "loadavg"
    file.write_text(content)
    notice = busy_notice(file)
    assert (notice is not None) is busy
    if notice is not None:
        assert f"load {float(content.split()[0]):.1f} on 2 cores" in notice


def test_busy_notice_needs_linux(tmp_path: Path) -> None:
    assert busy_notice(tmp_path / "missing") is None
