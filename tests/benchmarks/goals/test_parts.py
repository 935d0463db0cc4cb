"""Parts: every command of the plan is one that its program understands."""

from pathlib import Path

import pytest

from benchmarks.goals.parts import BATCHES, BUNDLED, Plan, make_checkpoints, parts
from benchmarks.goals.wanted import goals
from benchmarks.peers.__main__ import parse as parse_peers
from benchmarks.peers.serving import parse as parse_serving
from model.checkpoint.checkpoint import read_checkpoint


def plan(folder: Path, *, small: bool = False, python: str | None = "python") -> Plan:
    return Plan(folder, threads=2, peer_python=python, small=small)


@pytest.mark.parametrize("small", [True, False])
def test_every_goal_is_read_off_a_part(tmp_path: Path, small: bool) -> None:
    asked = plan(tmp_path, small=small)
    names = [part.name for part in parts(asked)]
    assert len(names) == len(set(names))
    assert {goal.part for goal in goals(asked)} <= set(names)
    wanted = [goal.name for goal in goals(asked)]
    assert len(wanted) == len(set(wanted))


def test_without_an_interpreter_for_them_nobody_is_compared_with(tmp_path: Path) -> None:
    names = {part.name for part in parts(plan(tmp_path, python=None))}
    assert not {name for name in names if name.startswith(("peers", "serving"))}
    assert "bench-124m-int8" in names


def test_bench_measures_http_once_for_each_shape(tmp_path: Path) -> None:
    found = {part.name: part.command for part in parts(plan(tmp_path))}
    for shape in ("124m", "30m", BUNDLED):
        assert "--skip-http" in found[f"bench-{shape}-float32"]
        assert "--skip-http" not in found[f"bench-{shape}-bfloat16"]
        int8 = found[f"bench-{shape}-int8"]
        assert int8[int8.index("--quantize") + 1] == "int8"
        assert int8[int8.index("--dtype") + 1] == "bfloat16"


@pytest.mark.parametrize("small", [True, False])
def test_the_comparisons_take_their_flags(tmp_path: Path, small: bool) -> None:
    found = {part.name: part.command for part in parts(plan(tmp_path, small=small))}
    shape = "small" if small else "124m"
    peers = parse_peers(list(found[f"peers-{shape}"][3:]))
    serving = parse_serving(list(found[f"serving-{shape}"][3:]))
    for one in (peers, serving):
        assert (one.threads, one.peer_python) == (2, "python")
        assert one.batches == ((1, 3) if small else BATCHES)
        assert one.shape == peers.shape


def test_checkpoints_are_made_once(tmp_path: Path) -> None:
    asked = plan(tmp_path, small=True)
    make_checkpoints(asked)
    saved = asked.checkpoint("small")
    first = read_checkpoint(saved)
    assert first.config.context_length >= 512, "room for the longest of the small runs"
    before = saved.stat().st_mtime_ns
    make_checkpoints(asked)
    assert saved.stat().st_mtime_ns == before
