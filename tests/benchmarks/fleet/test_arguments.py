"""The command line of `python -m benchmarks.fleet`."""

import sys
from pathlib import Path

import pytest

from benchmarks.fleet.__main__ import main


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "bench.json cannot be read: No such file or directory"),
        ("{}", "bench.json is not the last line of `logitd bench`"),
        ("not JSON", "bench.json is not the last line of `logitd bench`"),
    ],
)
def test_other_json_files_are_refused(
    content: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "bench.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(sys, "argv", ["fleet", str(path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err
