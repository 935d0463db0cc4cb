"""The run on a GPU, tried on a CPU: it gets to its table, and skips what fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import PARTS

ROOT = Path(__file__).parents[3]


def run(out: Path, *flags: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, table, and the records of a run."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = out.read_text(encoding="utf-8").splitlines()
    return done.returncode, done.stdout, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--tiny", "--train-seconds", "6")
    code, table, records = run(tmp_path / "gpu.jsonl", *flags)
    assert (code, len(table.splitlines())) == (0, len(records)), table
    assert list(dict.fromkeys(record["part"] for record in records)) == list(PARTS)
    rates = [record["tokens/s"] for record in records if "tokens/s" in record]
    assert len(rates) == 5
    assert min(rates) > 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--parts", "machine,served", "--seconds", "0"), "no time was left"),
        (("--parts", "memory", "--device", "cpu", "--seconds", "6"), "stopped after 6 s"),
        pytest.param(
            ("--parts", "machine", "--device", "cuda"), "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_part_that_fails_is_skipped_with_its_reason(
    tmp_path: Path, flags: tuple[str, ...], reason: str
) -> None:
    out = tmp_path / "gpu.jsonl"
    out.write_text('{"part": "of another run", "failed": "before"}\n', encoding="utf-8")
    code, table, (_, *records) = run(out, *flags)
    assert code == 1
    assert [record["part"] for record in records] == flags[1].split(",")
    assert all(reason in record["failed"] for record in records)
    assert [line.split()[:2] for line in table.splitlines()] == [
        ["FAILED", record["part"]] for record in records
    ]
