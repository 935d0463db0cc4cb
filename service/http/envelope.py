"""Envelope: what replies of every operation have in common: who answered, and when."""

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.engine.events import FinishEvent
from logitd.model.operations.operation import new_id
from logitd.service.engine.usage import Usage

CHECKPOINT_HEADERS = tuple(
    f"X-Logitd-{name}" for name in ("Name", "Step", "Val-Loss", "Weights-Sha256")
)
"""Headers of a reply whose body is not JSON."""
HEADER_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


def envelope(kind: str, model: str, checkpoint: CheckpointInfo) -> dict[str, Any]:
    """The first members of every reply: its id, the name of the model and its weights."""
    return {
        "id": new_id(kind),
        "created": int(time.time()),
        "model": model,
        "checkpoint": checkpoint_name(checkpoint),
    }


def checkpoint_name(checkpoint: CheckpointInfo) -> dict[str, Any]:
    """The CheckpointName."""
    return {
        "name": checkpoint.name,
        "step": checkpoint.training.step,
        "val_loss": checkpoint.training.val_loss,
        "weights_sha256": checkpoint.weights_sha256,
    }


def checkpoint_headers(checkpoint: CheckpointInfo) -> dict[str, str]:
    """The same for replies whose body is not JSON. A null has no header; characters that a header
    cannot hold (a directory may have any name) are percent-encoded."""
    return {
        f"X-Logitd-{name.replace('_', '-').title()}": quote(str(value), safe=HEADER_SAFE)
        for name, value in checkpoint_name(checkpoint).items()
        if value is not None
    }


def timings(finishes: Sequence[FinishEvent], completion_tokens: int) -> dict[str, float]:
    """The Timings of a request, over all its sequences: from the first arrival to the first
    admission, to the first computed prompt, to the last end."""
    phases = _phases(finishes)
    decoding = phases["decode"] / 1e3
    return {
        **{f"{phase}_ms": took for phase, took in phases.items()},
        "ttft_ms": phases["queue"] + phases["prefill"],
        "tokens_per_second": completion_tokens / decoding if decoding > 0 else 0.0,
    }


def server_timing(finishes: Sequence[FinishEvent]) -> dict[str, str]:
    """The same phases as a header, which the developer tools of browsers draw. Milliseconds."""
    phases = (f"{phase};dur={took:.3f}" for phase, took in _phases(finishes).items())
    return {"Server-Timing": ", ".join(phases)}


def _phases(finishes: Sequence[FinishEvent]) -> dict[str, float]:
    usage = Usage()
    for event in finishes:
        usage.add(event)
    return usage.milliseconds()
