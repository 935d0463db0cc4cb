"""The documents are true: the file map holds the tree, the version is one, links lead somewhere."""

import re
import subprocess
from pathlib import Path

import yaml

from model.version import VERSION

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")


def tracked_files() -> set[str]:
    """Files of the tree; in a checkout those that git knows."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        return {name for name in listing.stdout.splitlines() if (ROOT / name).exists()}
    skipped = {".venv", "__pycache__", ".git", "runs", ".hypothesis", ".pytest_cache"}
    return {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*")
        if path.is_file() and not skipped & set(path.parts)
    }


def mapped_files() -> set[str]:
    """Paths of the file map: a fenced tree whose indentation is two spaces a level. A folder with
    `...` is told as one thing, and stands here with a trailing slash."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text.split("```tree\n", 1)[1].split("```", 1)[0]
    found: set[str] = set()
    folders: list[str] = []
    for line in tree.splitlines():
        name, *rest = line.split()
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        if name.endswith("/") and rest[:1] != ["..."]:
            folders.append(name)
        else:
            found.add("".join(folders) + name)
    return found


def goes_without_saying(name: str, files: set[str]) -> bool:
    """Whether a file's place tells what it is: a package's opening, or the tests of one module."""
    if name.rpartition("/")[2] == "__init__.py":
        return True
    tested = re.fullmatch(r"tests/(.+)/test_(\w+\.py)", name)
    return tested is not None and f"{tested[1]}/{tested[2]}" in files


def test_the_file_map_holds_the_tree() -> None:
    files, mapped = tracked_files(), mapped_files()
    whole_folders = tuple(name for name in mapped if name.endswith("/"))
    to_tell = {
        name
        for name in files
        if not name.startswith(whole_folders) and not goes_without_saying(name, files)
    }
    listed = {name for name in mapped if not name.endswith("/")}
    assert to_tell - listed == set(), "files that ARCHITECTURE.md does not name"
    assert listed - to_tell == set(), "names in ARCHITECTURE.md without a file"
    for folder in whole_folders:
        assert (ROOT / folder).is_dir(), folder


def test_links_between_documents_lead_somewhere() -> None:
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                assert (ROOT / target).exists(), f"{name} links to {target}"


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", text, flags=re.MULTILINE)
    assert versions[0] == VERSION


def test_compose_publishes_on_this_machine_only() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), port
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


def test_the_container_leaves_time_to_drain() -> None:
    """The engine is stopped by --drain-timeout; compose must not kill it earlier."""
    from service.settings import ServeSettings

    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    grace = int(compose["services"]["logitd"]["stop_grace_period"].removesuffix("s"))
    assert grace > ServeSettings.model_fields["drain_timeout"].default + 5
