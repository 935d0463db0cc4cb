"""The tutorial's Python blocks, run in order against a real server, print the shown output."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import ServedProcess

TUTORIAL = Path(__file__).parents[2] / "service" / "client" / "tutorial.md"
ADDRESS = "http://127.0.0.1:8000"
NUMBER = re.compile(r"-?\d+(?:\.\d*)?")


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    """A server in float32, like the tutorial's."""
    with ServedProcess("--dtype", "float32") as process:
        yield process


def steps() -> list[tuple[str, str]]:
    """Each Python block with the output after it."""
    text = TUTORIAL.read_text(encoding="utf-8")
    found = re.findall(r"^```(python|text)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    kinds = [kind for kind, _ in found]
    assert kinds == ["python", "text"] * (len(kinds) // 2), "each block shows what it prints"
    blocks = [content for _, content in found]
    return list(zip(blocks[::2], blocks[1::2], strict=True))


def assert_shows(printed: str, shown: str) -> None:
    """Compare words exactly. Numbers may differ by one in the last shown digit, because processors
    sum in different orders."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), printed
    for value, expected in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        digits = len(expected.partition(".")[2])
        assert float(value) == pytest.approx(float(expected), abs=1.01 * 10**-digits), printed


def test_steps_print_the_shown_output(server: ServedProcess) -> None:
    assert len(steps()) >= 6
    names: dict[str, Any] = {}
    for code, shown in steps():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code.replace(ADDRESS, server.url), names)
        assert_shows(printed.getvalue(), shown)
    names["client"].close()


def test_comparison_can_fail() -> None:
    assert_shows("a 0.51 b", "a 0.52 b")
    for printed in ("a 0.49 b", "a 0.52 c", "a 0.52 b 1"):
        with pytest.raises(AssertionError):
            assert_shows(printed, "a 0.52 b")
