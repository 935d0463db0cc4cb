"""Optional packages: the printed command installs the packages that pyproject.toml lists."""

import sys
import tomllib
from pathlib import Path

import pytest

from logitd.model.extras import EXTRAS, installation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("extra", EXTRAS)
def test_packages_are_those_of_the_project(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert list(EXTRAS[extra]) == project["optional-dependencies"][extra]


def test_printed_command_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    assert installation("parquet") == ".venv/bin/python -m pip install 'pyarrow>=20'"
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "executable", "/opt/my envs/bin/python")
    assert installation("gguf") == "'/opt/my envs/bin/python' -m pip install 'gguf>=0.17'"


def test_no_text_installs_logitd_from_an_index() -> None:
    """On a package index, the name may belong to another package, or may not exist."""
    texts = [
        path
        for folder in ("model", "service", "logitd", "checkpoints", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".html", ".js")
    ]
    named = [
        str(path.relative_to(ROOT))
        for path in [*texts, *ROOT.glob("*.md")]
        for text in [path.read_text(encoding="utf-8")]
        if "logitd[" in text or "install logitd" in text
    ]
    assert named == []
