"""Job: runs an owner's code once to compute logits for random ids or to measure facts."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
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
    """Compute logits for two sequences of `length` random ids below `rows`. Returns `token_ids`,
    their `logits`, and the logits with another last id, `changed`. Raises CodeError. Its message
    follows the name of the code in a sentence."""
    job = Job("compare", asdict(request), {"rows": rows, "length": length})
    with tempfile.TemporaryDirectory(prefix="logitd-code-") as scratch:
        _run(job, weights, Path(scratch), ANSWER, timeout)
        return load_file(Path(scratch) / ANSWER)


def measure(
    request: Request,
    weights: Mapping[str, Tensor],
    *,
    rows: int | None = None,
    context: int | None = None,
    lens: Sequence[str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Measure the facts of a model (`process/measure.py`). Raises CodeError, as `compare` does."""
    options = {"rows": rows, "context": context, "lens": lens}
    with tempfile.TemporaryDirectory(prefix="logitd-code-") as scratch:
        _run(Job("measure", asdict(request), options), weights, Path(scratch), FACTS, timeout)
        facts: dict[str, Any] = json.loads((Path(scratch) / FACTS).read_text(encoding="utf-8"))
    return facts


def _run(
    job: Job, weights: Mapping[str, Tensor], folder: Path, result: str, timeout: float
) -> None:
    """Run a job in a folder. Raises CodeError unless it writes the file `result`."""
    real = {
        name: tensor.clone().contiguous()
        for name, tensor in weights.items()
        if not tensor.is_complex()
    }
    save_file(real, folder / WEIGHTS)
    (folder / REQUEST).write_text(json.dumps(asdict(job)), encoding="utf-8")
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
            f" did not return logits within {timeout:.0f} seconds; name only the class, so that no "
            "other code of the file runs"
        ) from error
    problem = folder / PROBLEM
    if problem.is_file():
        raise CodeError(f": {problem.read_text(encoding='utf-8')}")
    if done.returncode or not (folder / result).is_file():
        raise CodeError(
            f" ended with status {done.returncode} and no logits: {last_lines(done.stderr)}"
        )
