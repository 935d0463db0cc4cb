"""Options for computing with a model, and parsers for their values on the command line. Imports no
torch."""

import math
import re
from dataclasses import dataclass, fields
from typing import Literal

from logitd.model.dtypes import DTypeName

KernelChoice = Literal["auto", "native", "torch"]
TargetName = Literal[
    "x86-64-v2",
    "x86-64-v3",
    "x86-64-v4",
    "x86-64-v4-vnni",
    "x86-64-v4-bf16",
    "x86-64-v4-amx",
    "armv8-a",
]
"""Processor types that the native kernels can be built for."""
KernelTarget = Literal["auto", TargetName]
Quantization = Literal["none", "int8", "int4"]
"""Quantization of the weight matrices. With int4 the head is in int8."""
KVCacheDType = Literal["auto", "int8"]
"""Dtype of keys and values: the model's, or int8 with a scale for each head and position."""
Speculation = Literal["none", "ngram"]
DRAFTED_ROWS = 16
"""Maximum number of rows of a decode step that includes drafts. With more rows, a draft would cost
as much time as it saves."""
SECONDS = {"ms": 1e-3, "s": 1.0}
"""Units of time, in seconds."""
UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
"""Units of memory, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """Options for computing with a checkpoint. The defaults adapt to this machine.

    threads     number of threads of torch and of the native decoder; 0: one per processor
    run_code    allow the owner's code to run, if it computes the checkpoint's model
    batch_code  let that code compute several sequences in one batch, which may change the bits of
                the logits
    """

    device: str = "auto"
    dtype: DTypeName = "auto"
    threads: int = 0
    kernels: KernelChoice = "auto"
    kernel_target: KernelTarget = "auto"
    quantize: Quantization = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    run_code: bool = False
    batch_code: bool = False

    @classmethod
    def of(cls, settings: object) -> "ComputeOptions":
        """Options from the attributes of `settings` with the same names. The others keep their
        defaults."""
        names = (field.name for field in fields(cls))
        return cls(**{name: getattr(settings, name) for name in names if hasattr(settings, name)})


DEFAULTS = ComputeOptions()


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """A share of a device's memory. On a GPU it is a share of all memory, including the memory of
    weights and other processes; on a CPU it is a share of the memory that the weights leave
    free."""

    fraction: float

    def __str__(self) -> str:
        return f"{100 * self.fraction:g}%"


MemorySize = int | MemoryShare
"""Bytes, or a share of a device's memory."""


@dataclass(frozen=True, slots=True)
class SlotDefault:
    """Number of slots if the user sets none. Without a `share`, it is `most`. With a `share`, it is
    the number of slots that fit into this share of the memory that the weights leave free, but at
    least 1 and at most `most`."""

    most: int
    share: MemoryShare | None = None


CODE_SLOTS = 8
"""Default number of slots for serving a model that its owner's code computes. Each step runs a
separate pass for each sequence, so more slots would not increase the tokens per second but would
slow down every stream."""
SERVED_SLOTS = SlotDefault(64, MemoryShare(0.25))
"""Default number of slots of a server. A quarter of the free memory leaves most of it to other
programs; slots take memory only once they are used (`model/inference/kv_cache.py`). The maximum of
64 limits the slowdown of a stream when all slots are in use."""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """A time, in multiples of the duration of a step that only decodes."""

    count: float

    def __str__(self) -> str:
        return f"{self.count:g}x"


TargetGap = float | DecodeSteps
"""Maximum duration of a step that processes prompts while other sequences are decoding, in seconds
or in decode steps (`model/inference/engine/budget.py`)."""


def parse_target_gap(text: str) -> TargetGap | None:
    """Parse a gap: "4x" means four decode steps, "150ms" and "0.2s" are times, and "none" means no
    target (None). Raises ValueError with the valid forms."""
    forms = "a gap between tokens: use a multiple of a decode step (4x), a time (150ms, 0.2s)"
    if (parsed := _number_and_unit(text, "x|ms|s", forms)) is None:
        return None
    number, unit = parsed
    if unit == "x":
        if not 1 < number <= 1000:
            raise ValueError(f"{text} is out of range: use more than 1x, at most 1000x")
        return DecodeSteps(number)
    return _in_seconds(text, number, unit)


def parse_target_ttft(text: str) -> float | None:
    """Parse the time until a first token, such as "500ms" or "2s"; "none" means no target (None).
    Raises ValueError with the valid forms."""
    forms = "a time until the first token: use a time (500ms, 2s)"
    parsed = _number_and_unit(text, "ms|s", forms)
    return None if parsed is None else _in_seconds(text, *parsed)


def _number_and_unit(text: str, units: str, forms: str) -> tuple[float, str] | None:
    """The parts of a number with one of `units`; None for "none". The error for any other text
    names the valid `forms`."""
    stripped = text.strip().lower()
    if stripped == "none":
        return None
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({units})", stripped)
    if match is None:
        raise ValueError(f"{text!r} is not {forms} or none")
    return float(match[1]), match[2]


def _in_seconds(text: str, number: float, unit: str) -> float:
    seconds = number * SECONDS[unit]
    if not 0 < seconds <= 3600:
        raise ValueError(f"{text} is out of range: use more than 0s, at most 3600s")
    return seconds


def format_target(target: TargetGap | None) -> str:
    """Format a target as `parse_target_gap` and `parse_target_ttft` read it."""
    match target:
        case None:
            return "none"
        case DecodeSteps():
            return str(target)
        case _:
            return f"{target:g}s"


def head_quantization(quantize: Quantization) -> Quantization:
    """Quantization of the head if `quantize` is the quantization of the other matrices. The head
    keeps eight bits, because no later layer compensates for its error, and because a tied head is
    also the embedding.
    """
    return "none" if quantize == "none" else "int8"


def parse_loss_limit(text: str) -> float:
    """Parse a limit on the added loss: "2%" is 0.02, "any" is infinity. Raises ValueError with the
    valid forms."""
    if text.strip().lower() == "any":
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a percentage: use 2% or 0.5%, or any for no limit")
    return float(match[1]) / 100


def parse_memory(text: str) -> MemorySize:
    """Parse an amount of memory: "8GiB", "500 MB", "1000000" or "80%". Raises ValueError with the
    valid forms."""
    stripped = text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*|%)", stripped.lower())
    if re.search("[A-Z]i?b$", stripped):
        raise ValueError(f"{text!r} is in bits: use bytes, such as 8GiB or 500MB")
    if match is None or (match[2] != "%" and match[2] not in UNITS):
        raise ValueError(
            f"{text!r} is not an amount of memory: use bytes (8GiB, 500MB) or a share (80%)"
        )
    number = float(match[1])
    if match[2] == "%":
        if not 0 < number <= 100:
            raise ValueError(f"{text} is not a share of the memory: use more than 0%, at most 100%")
        return MemoryShare(number / 100)
    unit = UNITS[match[2]]
    size = int(match[1]) * unit if match[1].isdigit() else int(number * unit)
    if size < 1:
        raise ValueError(f"{text} is less than a byte: use bytes (8GiB, 500MB) or a share (80%)")
    return size
