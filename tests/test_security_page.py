"""SECURITY.md: the dependencies that it lists are the dependencies in pyproject.toml, and the tests
that it names exist.
"""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


SLOW_ALONE = {"ray"}
"""Extras that only `make test-slow` installs."""


def dependencies() -> set[str]:
    """Dependencies of serving and training, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.split(r"[<>=;\[ ]", line)[0] for lines in lists for line in lines}


def licenses() -> dict[str, str]:
    """The license that the page states for each dependency."""
    rows = PAGE.partition("| dependency | license |")[2].splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("|")]
    return {name: license for names, license in cells for name in names.split(", ")}


def test_all_dependencies_have_a_license() -> None:
    assert licenses().keys() == dependencies()


@pytest.mark.parametrize("name", sorted(dependencies()))
def test_licenses_equal_those_of_the_packages(name: str) -> None:
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        assert name in SLOW_ALONE, f"{name} is not installed"
        pytest.skip("`make test-slow` installs it")
    fields = ("License-Expression", "License", "Classifier")
    texts = [text for field in fields for text in metadata.get_all(field) or ()]
    known = " ".join(text for text in texts if text)
    kinds = {"MIT": "MIT", "Apache": "Apache", "BSD": "BSD", "MPL": "MPL", "its own": "matplotlib"}
    claimed = [word for kind, word in kinds.items() if kind in licenses()[name]]
    assert claimed
    assert all(word in known for word in claimed), known[:300]


def test_rows_of_bounds_name_existing_tests() -> None:
    rows = PAGE.partition("## Bounds")[2].partition("## What the operator")[0].splitlines()
    bounds = [row for row in rows if row.startswith("| ") and not row.startswith("| resource")]
    assert len(bounds) > 10
    for row in bounds:
        paths = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert paths, row
        assert all((ROOT / path).is_file() for path in paths), row
