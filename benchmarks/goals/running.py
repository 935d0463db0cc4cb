"""Running: one part after the other, each within its time, and what they found kept in a file.

A part whose command has a result is not run again; so what was ended can be begun again.
"""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.goals.parts import ROOT, Part, Plan, make_checkpoints, parts

END_SECONDS = 60.0
"""For what has run out of time to end what it started."""


def run(part: Part, folder: Path) -> dict[str, Any]:
    """What is kept of a part: its command, how long it took, and its JSON or why there is none."""
    began = time.monotonic()
    log = folder / f"{part.name}.txt"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(part.command, cwd=ROOT, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT)  # fmt: skip
        error = wait(process, part.seconds)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = None
    if error is None:
        try:
            found = json.loads(lines[-1])
        except (IndexError, ValueError):
            error = "its last line is no JSON"
    kept = {"command": list(part.command), "seconds": time.monotonic() - began}
    return {**kept, "error": error, "found": found}


def wait(process: "subprocess.Popen[bytes]", seconds: float) -> str | None:
    """None when it ended well; else why not. It is over in any case."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"it was ended after {seconds:g} s"
    finally:
        if process.poll() is None:
            process.terminate()  # so that it ends the server that it has started
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return None if code == 0 else f"it ended with {code}"


def is_done(kept: Mapping[str, Any] | None, part: Part) -> bool:
    """Whether there is a result of this very command."""
    return bool(kept and kept["error"] is None and kept["command"] == list(part.command))


def run_all(
    plan: Plan, *, again: Sequence[str] = (), only: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run what is not there yet, or of that `only` some; everything that is there then, by the
    names of the parts."""
    path = plan.folder / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    make_checkpoints(plan)
    for part in parts(plan):
        if only is not None and part.name not in only:
            continue
        if is_done(results.get(part.name), part) and part.name not in again:
            print(f"{part.name}: there already", flush=True)
            continue
        print(f"{part.name}: {' '.join(part.command[1:])}", flush=True)
        results[part.name] = run(part, plan.folder)
        if results[part.name]["error"] is not None:
            error, log = results[part.name]["error"], plan.folder / f"{part.name}.txt"
            print(f"{part.name}: {error}; {log} has its words", flush=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(results, indent=1), encoding="utf-8")
        beside.replace(path)
    return results
