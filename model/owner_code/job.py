"""Job: runs an owner's code once, to compute logits for random ids or to measure facts."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from logitd.model.owner_code.connection import ROOT, CodeError, command, environment, last_lines
from logitd.model.owner_code.process.__main__ import (
    ANSWER,
    FACTS,
    PROBLEM,
    REQUEST,
    WEIGHTS,
    Job,
)
from logitd.model.owner_code.process.build import Request

TIMEOUT_SECONDS = 300.0


def compare(
    request: Request,
    weights: Mapping[str, Tensor],
    *,
    rows: int,
    length: int,
    timeout: float = TIMEOUT_SECONDS,
) -> dict[str, Tensor]:
    """Compute logits for two sequences of `length` random ids below `rows`. The result has
    `token_ids`, their `logits`, and `changed`, the logits after the last id of each sequence was
    replaced. Raises CodeError; the caller must prefix its message with the name of the code."""
    job = Job("compare", asdict(request), {"rows": rows, "length": length})
    return load(_run(job, weights, ANSWER, timeout))


def measure(
    request: Request,
    weights: Mapping[str, Tensor],
    *,
    context: int | None,
    lens: Sequence[str] | None,
) -> dict[str, Any]:
    """Measure the facts of a model (`process/measure.py`). Raises CodeError, as `compare` does."""
    job = Job("measure", asdict(request), {"context": context, "lens": lens})
    facts: dict[str, Any] = json.loads(_run(job, weights, FACTS, TIMEOUT_SECONDS))
    return facts


def _run(job: Job, weights: Mapping[str, Tensor], result: str, timeout: float) -> bytes:
    """Run a job. Returns the contents of the file `result`, which the job must write. Raises
    CodeError."""
    real = {
        name: tensor.clone().contiguous()
        for name, tensor in weights.items()
        if not tensor.is_complex()
    }
    with tempfile.TemporaryDirectory(prefix="logitd-code-") as scratch:
        folder = Path(scratch)
        try:
            save_file(real, folder / WEIGHTS)
            (folder / REQUEST).write_text(json.dumps(asdict(job)), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise CodeError(
                f" cannot run, because its weights cannot be written to {folder}: {error}; free "
                "space there, or set TMPDIR to another folder"
            ) from error
        try:
            done = subprocess.run(
                command(folder),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
                env=environment(),
            )
        except subprocess.TimeoutExpired as error:
            raise CodeError(
                f" did not finish within {timeout:.0f} seconds; name only the model's class, so "
                "that the other code in the file does not run"
            ) from error
        problem = folder / PROBLEM
        if problem.is_file():
            raise CodeError(f": {problem.read_text(encoding='utf-8')}")
        if done.returncode or not (folder / result).is_file():
            raise CodeError(
                f" ended with status {done.returncode} and without a result: "
                f"{last_lines(done.stderr)}"
            )
        return (folder / result).read_bytes()
