"""Expressions that the project does not use: for each there is a plainer one, or the field's term.

Reads strings, docstrings, comments, names and Markdown, as text. A room is a folder or a file; its
list grows until all rooms have every expression. Not here: spelling, and the rules of CONTRIBUTING
that need a reader.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

INSTEAD = {
    r"\bcompany\b": "other requests in the batch; batch invariance",
    r"\bobey(s|ed)?\b": "handle",
    r"\bpatien(ce|t)\b": "timeout (early stopping has a patience)",
    r"(?<!there\x20)\b(is|are|was|were) no (?!longer|more|less|larger|earlier|later|better)":
        "is not a, has no, does not",
    r"\b(holds?|names) no\b": "has no, does not name",
    r"\bin front\b": "before",
    r"\bnumbers (of|to)\b": "elements of, values of, figures of; dtype",
    r"\bwish(es)?\b": "request, settings",
    r"\bspoken\b": "describe, format",
    r"\bbeside the event loop\b": "off the event loop, in a thread",
}  # fmt: skip
"""What not to write, and what says it better."""
EVERYTHING = frozenset(INSTEAD)

CLEAN = (
    *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "checkpoints", "logitd"),
    *(
        "model/__init__.py",
        "model/device.py",
        "model/dtypes.py",
        "model/llm.py",
        "model/version.py",
    ),
    *("model/benchmark", "model/evaluation", "model/text"),
    *("service/__init__.py", "service/README.md", "service/cli.py", "service/log.py"),
    *("service/app", "service/commands", "service/core", "service/engine", "service/openai"),
    *("service/requests", "service/responses", "service/routes", "service/schemas"),
    "service/settings",
    *("tests/benchmarks", "tests/conftest.py", "tests/test_documents.py", "tests/test_layering.py"),
    *("tests/service/app", "tests/service/commands", "tests/service/core", "tests/service/engine"),
    *("tests/service/openai", "tests/service/requests", "tests/service/responses"),
    *("tests/service/routes", "tests/service/schemas"),
    *("tests/service/conftest.py", "tests/service/serving.py", "tests/service/spelling.py"),
    *("tests/service/test_disconnects.py", "tests/service/test_overload.py"),
)
"""Rooms that are free of all of them. To be extended until it is the whole tree."""
EXCEPT = {"service/settings": {r"\bpatien(ce|t)\b"}}  # the recipe's early stopping
ROOMS = {room: EVERYTHING - EXCEPT.get(room, set()) for room in CLEAN}
SUFFIXES = {".py", ".md", ".html", ".js", ".css", ".h", ".cpp"}


def files(room: str) -> Iterator[Path]:
    """The texts of a room."""
    path = ROOT / room
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.suffix in SUFFIXES and file.is_file():
            yield file


def occurrences(file: Path, expressions: frozenset[str]) -> Iterator[str]:
    """Where expressions stand in a file, also across the end of a line, and what to write."""
    text = file.read_text(encoding="utf-8")
    for expression in sorted(expressions):
        pattern = expression.replace(" ", r"\s+(?:#\s+)?")
        for match in re.finditer(pattern, text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            said = " ".join(match[0].split())
            yield f"{file.relative_to(ROOT)}:{line}: {said!r}; rather: {INSTEAD[expression]}"


@pytest.mark.parametrize("room", ROOMS)
def test_plain_words_are_used(room: str) -> None:
    texts = list(files(room))
    assert texts, "the room exists"
    assert [line for file in texts for line in occurrences(file, ROOMS[room])] == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"""A token in any company."""', 1),
        ("# This is no\n# field.", 1),
        ("a = 1\nb = 'the one in\nfront of it'", 2),
        ("def obey(): ...", 1),
    ],
)
def test_the_rule_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: int
) -> None:
    monkeypatch.setattr("tests.test_language.ROOT", tmp_path)
    file = tmp_path / "a.py"
    file.write_text(text)
    (found,) = occurrences(file, EVERYTHING)
    assert found.startswith(f"a.py:{line}: ")


@pytest.mark.parametrize(
    "text", ["there is no room", "it is no longer held", "a string has no end", "is not a number"]
)
def test_plain_english_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(text)
    assert list(occurrences(file, EVERYTHING)) == []
