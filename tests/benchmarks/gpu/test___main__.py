"""`benchmarks.gpu` on a CPU: every part runs, and a failing part is skipped with a reason."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as run
from benchmarks.gpu.part import Setting


@pytest.fixture
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("threads_kept")
@pytest.mark.parametrize("name", run.PARTS)
def test_part_runs_on_a_cpu(name: str) -> None:
    part = getattr(importlib.import_module(f"benchmarks.gpu.{run.PARTS[name][0]}"), name)
    findings = list(part(Setting("cpu", tiny=True, train_seconds=3)))
    assert findings
    assert all(finding.holds is not False for finding in findings)
    rates = [finding.figures["tokens/s"] for finding in findings if "tokens/s" in finding.figures]
    assert len(rates) == {"served": 4, "trained": 1, "steps": 4}.get(name, 0)
    assert all(rate > 0 for rate in rates)


@pytest.mark.parametrize(
    ("flags", "code", "outcome"),
    [
        pytest.param(
            ("--parts", "machine", "--device", "cpu", "--tiny"), 0, "limits",
            marks=pytest.mark.slow,
        ),
        (("--parts", "machine,served", "--seconds", "0"), 1, "no time was left"),
        (("--parts", "memory", "--device", "cpu", "--seconds", "1.5"), 1, "stopped after 1 s"),
        pytest.param(
            ("--parts", "machine", "--device", "cuda"), 1, "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_run_keeps_the_outcome_of_every_part(
    tmp_path: Path,
    flags: tuple[str, ...],
    code: int,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "gpu.jsonl"
    out.write_text('{"part": "of another run", "failed": "before"}\n', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(out), *flags])
    if "1.5" in flags:
        monkeypatch.setattr(run, "LEAST_SECONDS", 0.0)
    assert run.main() == code
    _, *records = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert [record["part"] for record in records] == flags[1].split(",")
    assert all(outcome in record.get("failed", record.get("case")) for record in records)
    table = capfd.readouterr().out.splitlines()
    assert len(table) == len(records)
    for line, record in zip(table, records, strict=True):
        assert record["part"] in line
        assert line.startswith("FAILED") == bool(code)
