"""The GPU run: compare results on the GPU with the CPU's, then measure serving and training.

    python -m benchmarks.gpu --out gpu.jsonl [--parts logits,served] [--train-seconds 120]

Each part is a process with its own time limit; --seconds limits all of them together. Every finding
is written immediately to --out, as a line of JSON. If a part fails or has no time left, the reason
is recorded and the next part runs. At the end the findings are printed as a table. The exit code is
1 if a part or a check failed. `--device cpu --tiny` tries out the run on any machine.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Setting

ROOT = Path(__file__).parents[2]
PARTS = {
    "machine": ("speed", 30), "checked": ("truth", 90), "logits": ("truth", 60),
    "greedy": ("truth", 60), "steps": ("speed", 60), "served": ("speed", 150),
    "trained": ("speed", 90),
    "recorded": ("truth", 90), "overlap": ("truth", 90), "invariance": ("truth", 90),
    "memory": ("truth", 60),
}  # fmt: skip
"""Parts in order, each with its module and its time limit in seconds; --train-seconds is added to
the limit of `trained`."""
LEAST_SECONDS, GRACE_SECONDS = 5.0, 10.0
"""In seconds: the minimum time for a part, and the time for a part to stop its processes."""
FAILED = 3
"""Exit code of a part that has recorded its failure."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="file to which the findings are appended")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=470.0, help="limit of all parts together")
    parser.add_argument("--train-seconds", type=float, default=120.0)
    parser.add_argument("--tiny", action="store_true", help="sizes that suit any machine")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.parts.split(",")) - set(PARTS):
        parser.error(f"--parts has {', '.join(unknown)}; available are {', '.join(PARTS)}")
    setting = Setting(given.device, given.tiny, given.train_seconds)
    if given.one is not None:
        return run_here(given.one, setting, given.out)
    with tempfile.TemporaryDirectory(prefix="logitd-gpu-") as folder:
        out = given.out or Path(folder) / "gpu.jsonl"
        before = out.stat().st_size if out.exists() else 0
        end = time.monotonic() + given.seconds
        for name in PARTS:
            if name in given.parts.split(","):
                limit = PARTS[name][1] + given.train_seconds * (name == "trained")
                run_part(name, min(limit, end - time.monotonic()), out.resolve())
        lines = out.read_bytes()[before:].splitlines()
    records = [json.loads(line) for line in lines]
    print("\n".join(map(row, records)))
    return int(any("failed" in record or record["holds"] is False for record in records))


def run_part(name: str, limit: float, out: Path) -> None:
    """Run a part in its own process for at most `limit` seconds."""
    if limit < LEAST_SECONDS:
        keep(out, {"part": name, "failed": "no time was left"})
        return
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--one", name, "--out", str(out)],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True,
    )  # fmt: skip
    try:
        if (code := process.wait(limit)) not in (0, FAILED):
            keep(out, {"part": name, "failed": f"exited with code {code}"})
    except subprocess.TimeoutExpired:
        keep(out, {"part": name, "failed": f"stopped after {limit:.0f} s"})
    finally:
        stop(process)
    print(f"{name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a part and its child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run_here(name: str, setting: Setting, out: Path) -> int:
    """Run a part in this process."""
    began = time.monotonic()
    try:
        part = getattr(importlib.import_module(f"benchmarks.gpu.{PARTS[name][0]}"), name)
        for finding in part(setting):
            seconds = round(time.monotonic() - began, 1)
            case = {"part": name, "case": finding.case, "holds": finding.holds}
            keep(out, {**case, "seconds": seconds, **finding.figures})
    except Exception as error:  # the other parts still run
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        reason = reason if len(reason) < 500 else f"{reason[:200]} ... {reason[-300:]}"
        keep(out, {"part": name, "failed": reason})
        return FAILED
    return 0


def keep(out: Path, record: dict[str, Any]) -> None:
    """Append a record and flush it to the disk."""
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(row(record), file=sys.stderr, flush=True)


def row(record: dict[str, Any]) -> str:
    """A record as a row of the table."""
    if "failed" in record:
        return f"FAILED {record['part']:<11} {record['failed']}"
    mark = {None: "", True: "ok", False: "WRONG"}[record["holds"]]
    figures = [
        f"{name} {value:,.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record.items()
        if name not in ("part", "case", "holds", "seconds")
    ]
    return f"{mark:<6} {record['part']:<11} {record['case']:<36} {', '.join(figures)}"


if __name__ == "__main__":
    sys.exit(main())
