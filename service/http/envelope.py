"""Envelope: the headers and timings of replies."""

from collections.abc import Sequence
from urllib.parse import quote

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.engine.events import FinishEvent
from logitd.model.operations.operation import checkpoint_name
from logitd.service.engine.usage import Usage

CHECKPOINT_HEADERS = tuple(
    f"X-Logitd-{name}" for name in ("Name", "Step", "Val-Loss", "Weights-Sha256")
)
"""Headers that identify the checkpoint if the reply's body is not JSON."""
HEADER_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


def checkpoint_headers(checkpoint: CheckpointInfo) -> dict[str, str]:
    """The members of `CheckpointName` as headers, without nulls. Names of directories may contain
    any character, so characters that a header cannot contain are percent-encoded."""
    return {
        f"X-Logitd-{name.replace('_', '-').title()}": quote(str(value), safe=HEADER_SAFE)
        for name, value in checkpoint_name(checkpoint).items()
        if value is not None
    }


def checkpoint_metadata(checkpoint: CheckpointInfo) -> dict[str, str]:
    """The members of `CheckpointName` as metadata of a safetensors file."""
    return {f"checkpoint_{key}": str(value) for key, value in checkpoint_name(checkpoint).items()}


def timings(finishes: Sequence[FinishEvent], completion_tokens: int) -> dict[str, float]:
    """The members of `Timings` for a request. The queue phase lasts from the arrival of the first
    sequence to the first admission, the prefill phase from there until the first prompt is
    computed, and the decode phase until the last sequence ends. The first token of a sequence is
    sampled at the end of its prefill, so the rate does not count it."""
    phases = _phases(finishes)
    decoding = phases["decode"] / 1e3
    decoded = max(0, completion_tokens - len(finishes))
    return {
        **{f"{phase}_ms": took for phase, took in phases.items()},
        "ttft_ms": phases["queue"] + phases["prefill"],
        "tokens_per_second": decoded / decoding if decoding > 0 else 0.0,
    }


def server_timing(finishes: Sequence[FinishEvent]) -> dict[str, str]:
    """The phases in milliseconds as a Server-Timing header, which browsers' developer tools
    show."""
    phases = (f"{phase};dur={took:.3f}" for phase, took in _phases(finishes).items())
    return {"Server-Timing": ", ".join(phases)}


def _phases(finishes: Sequence[FinishEvent]) -> dict[str, float]:
    usage = Usage()
    for event in finishes:
        usage.add(event)
    return usage.milliseconds()
