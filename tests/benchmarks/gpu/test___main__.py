"""The GPU's benchmark runs from its first check to its table, on a CPU, where its times mean
nothing: whoever has a card for an hour must not meet a typing error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_part_runs() -> None:
    # One thread: with more, torch's float32 products on a CPU do not treat all rows alike, and the
    # check of batch invariance says so.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--threads", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == {}
    parts = {finding["part"] for finding in found["findings"]}
    speeds = {"decode", "prefill", "kernels", "transformers", "http", "training", "trained"}
    assert parts == speeds | {
        "logits",
        "random",
        "greedy",
        "replay",
        "overlap",
        "invariance",
        "memory",
    }
    measured = {row["target"] for row in found["targets"] if row["measured"] is not None}
    assert "tiny: training, of the matrix rate" in measured
    assert all(finding["holds"] is not False for finding in found["findings"])
