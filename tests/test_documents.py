"""The documents: every folder is listed, and every file begins with a sentence that describes it;
links, paths, commands and flags exist. tests/e2e/test_readme.py runs curl lines and Python
blocks."""

import re
import shlex
from pathlib import Path

import pytest

from logitd.model.version import VERSION
from tests import file_map
from tests.service.cli.parsed import SETTINGS, parsed, words_of

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(
        path
        for folder in (*file_map.PACKAGES, "checkpoints", "tests")
        for path in sorted((ROOT / folder).rglob("*.md"))
        if not (path.parent / "config.json").exists()  # the card of a checkpoint is generated
    ),
]
PLACES = r"`((?:model|service|logitd|benchmarks|tests|checkpoints)/[\w./-]*)`"
COMMAND_LINE = r"^ *(?:\.venv/bin/)?logitd ([a-z]+)(.*)$"


def listed_folders() -> set[str]:
    """Folders of ARCHITECTURE.md's list: a fenced tree with two spaces per level and one or several
    folders per line."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text.split("## Where things are", 1)[1].split("```\n", 1)[1].split("```", 1)[0]
    found: set[str] = set()
    parents: list[str] = []
    for line in tree.splitlines():
        del parents[(len(line) - len(line.lstrip())) // 2 :]
        names = re.findall(r"[\w.]+/", line[:25])
        found.update("".join([*parents, name]) for name in names)
        parents.append(names[0])
    return found


def test_all_folders_are_listed() -> None:
    listed = listed_folders()
    of_code = {
        f"{path.parent.relative_to(ROOT)}/" for path in file_map.sources() if path.suffix == ".py"
    }
    assert of_code - listed == set(), "folders without a line in ARCHITECTURE.md"
    assert {name for name in listed if not (ROOT / name).is_dir()} == set()


def test_all_files_have_an_opening_sentence() -> None:
    """`make map` prints these sentences."""
    silent = [str(path) for path in file_map.sources() if len(file_map.opening(path)) <= 10]
    assert silent == [], "files without an opening sentence"


each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)


def code_blocks(document: Path) -> str:
    """The shell blocks and indented blocks of a document, with continued lines joined."""
    text = document.read_text(encoding="utf-8")
    fenced = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}.*$", text, flags=re.MULTILINE)
    return "\n".join([*fenced, *indented]).replace("\\\n", " ")


def known_flags() -> set[str]:
    """Flags of `logitd`'s commands and of the benchmarks."""
    flags = set()
    for command in SETTINGS:
        flags.update(words_of(command))
    for path in (ROOT / "benchmarks").rglob("*.py"):
        flags.update(re.findall(r'"(--[a-z][a-z0-9-]*)"', path.read_text(encoding="utf-8")))
    return flags


@each_document
def test_links_have_targets(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), f"a link to {target}"


@each_document
def test_places_exist(document: Path) -> None:
    """Checks files and folders in backticks, if their whole path is given."""
    text = document.read_text(encoding="utf-8")
    gone = [place for place in re.findall(PLACES, text) if not (ROOT / place).exists()]
    assert gone == []


@pytest.fixture(scope="module")
def words_of_the_sources() -> set[str]:
    paths = [
        *file_map.sources(),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "service").rglob("*.js"),
        *(
            ROOT / name
            for name in ("Makefile", "pyproject.toml", "Dockerfile", "docker-compose.yml")
        ),
    ]
    text = "\n".join([path.read_text(encoding="utf-8") for path in paths])
    return {path.stem for path in paths} | set(re.findall(r"\w+", text))


@each_document
def test_names_exist(document: Path, words_of_the_sources: set[str]) -> None:
    """Checks `snake_case`, `CamelCase` and `Class.method`, but no other words. Prometheus adds
    `_total` to the name of a counter."""
    text = document.read_text(encoding="utf-8").split("### Changed")[0]
    quoted = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*(?:\(\))?)`", text)
    names = {name for one in quoted for name in re.findall(r"\w*_\w+|[A-Z]\w*[a-z][A-Z]\w*", one)}
    assert {name.removesuffix("_total") for name in names} <= words_of_the_sources


@each_document
def test_flags_exist(document: Path) -> None:
    """Flags that the changelog lists as renamed are excluded."""
    text = document.read_text(encoding="utf-8").split("### Changed")[0]
    assert set(re.findall(r"`(--[a-z][a-z0-9-]*)", text)) - known_flags() == set()


@each_document
def test_command_lines_are_understood(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parse the commands. A synopsis may have [optional] flags and end in "..."."""
    monkeypatch.chdir(tmp_path)  # without a .env
    for command, rest in re.findall(COMMAND_LINE, code_blocks(document), flags=re.MULTILINE):
        words = shlex.split(rest.translate({ord("["): None, ord("]"): None}), comments=True)
        given = [word for word in words if word not in ("...", "&")]
        assert command in SETTINGS, command
        parsed(command, *given)


def test_changelog_starts_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", text, flags=re.MULTILINE)
    assert versions[0] == VERSION


def test_sources_name_files_that_exist() -> None:
    """Docstrings refer to files by path, and the files may move."""
    folders = ("model", "service", "logitd", "benchmarks", "deploy", "tests")
    sources = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    paths = [
        f"/{path.relative_to(ROOT)}" for path in sources if path.suffix in {".py", ".h", ".cpp"}
    ]
    stale = [
        f"{path[1:]} names {name}"
        for path in paths
        for name in re.findall(
            r"`([\w/.]+\.(?:py|h|cpp))`", (ROOT / path[1:]).read_text(encoding="utf-8")
        )
        if not any(other.endswith(f"/{name}") for other in paths)
    ]
    assert stale == []
