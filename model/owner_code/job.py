"""Job: runs an owner's code once, to compute logits for random ids or to measure facts."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from logitd.model.owner_code.connection import START_SECONDS, CodeProcess
from logitd.model.owner_code.process.__main__ import WEIGHTS, Job
from logitd.model.owner_code.process.build import Request


def compare(
    name: str,
    request: Request,
    weights: Mapping[str, Tensor],
    *,
    rows: int,
    length: int,
    timeout: float = START_SECONDS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences (2, T) of random ids below `rows`, their logits, and their logits after the
    last id of each was replaced. `name` is the owner's code, for messages. Raises CodeError."""
    job = Job("compare", asdict(request), {"rows": rows, "length": length})
    with _running(name, job, weights) as process:
        header, payload = process.receive(timeout)
        logits, changed = process.floats(payload, header.get("shape"))
    return torch.tensor(header["token_ids"]), logits, changed


def measure(
    name: str,
    request: Request,
    weights: Mapping[str, Tensor],
    *,
    context: int | None,
    lens: Sequence[str] | None,
) -> dict[str, Any]:
    """Measure the facts of a model (`process/measure.py`). `name` is the owner's code, for
    messages. Raises CodeError."""
    job = Job("measure", asdict(request), {"context": context, "lens": lens})
    with _running(name, job, weights) as process:
        return process.receive(START_SECONDS)[0]


@contextmanager
def _running(name: str, job: Job, weights: Mapping[str, Tensor]) -> Iterator[CodeProcess]:
    real = {
        name: tensor.clone().contiguous()
        for name, tensor in weights.items()
        if not tensor.is_complex()
    }
    scratch = tempfile.TemporaryDirectory(prefix="logitd-code-")
    save_file(real, Path(scratch.name) / WEIGHTS)
    process = CodeProcess(name, scratch, job)
    try:
        yield process
    finally:
        process.close()
