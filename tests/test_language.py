"""Expressions that the project does not use: for each there is a plainer one, or the field's term.

Reads strings, docstrings, comments, names and Markdown, as text. Not here: spelling, and the rules
of CONTRIBUTING that need a reader.
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

ROOMS = (
    *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "checkpoints/README.md"),
    *("benchmarks", "logitd", "model", "service", "tests"),
)
EARLY_STOPPING = {
    *(
        "benchmarks/gpu/training.py",
        "model/training/configuration/config.py",
        "model/training/configuration/presets.py",
    ),
    *("model/training/trainer.py", "tests/model/training/test_trainer.py"),
    *("model/training/README.md", "model/training/recording/evaluator.py"),
    *("model/training/stopping/worsening.py", "tests/model/training/stopping/test_worsening.py"),
}
"""Where patience is the field's term: evaluations without a new best."""
PATIENCE = r"\bpatien(ce|t)\b"
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
    texts = [file for file in files(room) if file != Path(__file__)]
    assert texts, "the room exists"
    found: list[str] = []
    for file in texts:
        early_stopping = str(file.relative_to(ROOT)) in EARLY_STOPPING
        found += occurrences(file, EVERYTHING - ({PATIENCE} if early_stopping else set()))
    assert found == []


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
