"""Running: what is there is not run again, what failed is, and nothing outlives its time."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goals import running
from benchmarks.goals.parts import Part, Plan
from benchmarks.goals.running import is_done, run, run_all


def part(source: str, name: str = "a", seconds: float = 30.0) -> Part:
    return Part(name, (sys.executable, "-c", source), seconds)


def test_the_last_line_is_what_was_found(tmp_path: Path) -> None:
    kept = run(part("print('a table'); print('{\"x\": 1}')"), tmp_path)
    assert (kept["found"], kept["error"]) == ({"x": 1}, None)
    assert (tmp_path / "a.txt").read_text().splitlines()[0] == "a table"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("print('{}'); raise SystemExit(3)", "it ended with 3"),
        ("print('no object')", "its last line is no JSON"),
        ("", "its last line is no JSON"),
    ],
)
def test_what_fails_is_said(tmp_path: Path, source: str, error: str) -> None:
    kept = run(part(source), tmp_path)
    assert (kept["found"], kept["error"]) == (None, error)


def test_it_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    began = time.monotonic()
    kept = run(part("import time; time.sleep(600)", seconds=0.2), tmp_path)
    assert kept["error"] == "it was ended after 0.2 s"
    assert time.monotonic() - began < 30


def test_a_result_is_that_of_its_command() -> None:
    kept: dict[str, Any] = {"command": list(part("x").command), "error": None, "found": {}}
    assert is_done(kept, part("x"))
    assert not is_done(kept, part("y"))
    assert not is_done({**kept, "error": "it ended with 1"}, part("x"))
    assert not is_done(None, part("x"))


def test_it_goes_on_where_it_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part counts its runs; the second fails until a file is there."""
    count, there = tmp_path / "count", tmp_path / "there"
    first = (
        f"from pathlib import Path; p = Path({str(count)!r}); "
        "p.write_text((p.read_text() if p.exists() else '') + 'x'); print(len(p.read_text()))"
    )
    second = f"from pathlib import Path; print(Path({str(there)!r}).read_text())"
    plan = Plan(tmp_path / "kept", threads=1, peer_python=None, small=True)
    plan.folder.mkdir()
    monkeypatch.setattr(running, "parts", lambda plan: iter([part(first), part(second, "b")]))
    assert run_all(plan, only=["b"]).keys() == {"b"}
    found = run_all(plan)
    assert (found["a"]["found"], found["b"]["found"]) == (1, None)
    there.write_text("7")
    found = run_all(plan)
    assert (found["a"]["found"], found["b"]["found"]) == (1, 7)
    assert run_all(plan, again=["a"])["a"]["found"] == 2
    assert run_all(plan, again=["a"], only=["b"])["a"]["found"] == 2
    assert json.loads((plan.folder / "results.json").read_text()).keys() == {"a", "b"}
