"""How a model can be served, by the names and texts that the command line takes. Without torch."""

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
"""Kinds of processors that the native kernels can be built for."""
KernelTarget = Literal["auto"] | TargetName
Quantization = Literal["none", "int8", "int4"]
"""Of the matrices of products; with int4 the head has int8."""
KVCacheDType = Literal["auto", "int8"]
"""Of keys and values: that which the model computes in, or bytes with a scale for each head's key
and value of each position."""
Speculation = Literal["none", "ngram"]
DRAFTED_ROWS = 16
"""Rows of a decode step up to which drafts are added to it; with more, each costs what it saves."""
SECONDS = {"ms": 1e-3, "s": 1.0}
"""Of a time."""
UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
"""Of an amount of memory, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """How a checkpoint is computed; the defaults are the best for this machine.

    threads  of torch and of the native decoder; 0: as many as there are processors
    """

    device: str = "auto"
    dtype: DTypeName = "auto"
    threads: int = 0
    kernels: KernelChoice = "auto"
    kernel_target: KernelTarget = "auto"
    quantize: Quantization = "none"
    kv_cache_dtype: KVCacheDType = "auto"

    @classmethod
    def of(cls, settings: object) -> "ComputeOptions":
        """The options among the attributes of `settings`."""
        names = (field.name for field in fields(cls))
        return cls(**{name: getattr(settings, name) for name in names if hasattr(settings, name)})


DEFAULTS = ComputeOptions()


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """A share of a device's memory: on a GPU of all of it, with the weights and what other
    processes take; on a CPU of what the weights leave free."""

    fraction: float

    def __str__(self) -> str:
        return f"{100 * self.fraction:g}%"


MemorySize = int | MemoryShare
"""Bytes, or a share of a device."""


@dataclass(frozen=True, slots=True)
class SlotDefault:
    """How many slots an empty budget gets: `most`. With a `share`, as many up to that as it holds
    of what the weights leave free, and one at least."""

    most: int
    share: MemoryShare | None = None


SERVED_SLOTS = SlotDefault(64, MemoryShare(0.25))
"""Where requests wait for each other. A cache takes no memory before its slots are used
(`model/inference/kv_cache.py`), and then a quarter leaves most to others. 64 bounds how slow a
stream gets where all are in use."""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """A time: so many times as long as a step takes that decodes and does nothing else."""

    count: float

    def __str__(self) -> str:
        return f"{self.count:g}x"


TargetGap = float | DecodeSteps
"""Seconds, or times a decode step, that a step with prompts should not exceed while others decode
(`model/inference/engine/budget.py`)."""


def parse_target_gap(text: str) -> TargetGap | None:
    """A time as people write it: "4x" is four times a decode step, "150ms" or "0.2s" a time,
    "none" is None. Raises ValueError, whose message says what can be written."""
    stripped = text.strip().lower()
    if stripped == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(x|ms|s)", stripped)
    if match is None:
        raise ValueError(
            f"{text!r} is not a gap between tokens: give a multiple of a decode step (4x), a "
            "time (150ms, 0.2s) or none"
        )
    number = float(match[1])
    if match[2] == "x":
        if not 1 < number <= 1000:
            raise ValueError(f"{text} has no room for prompts: give more than 1x, at most 1000x")
        return DecodeSteps(number)
    seconds = number * SECONDS[match[2]]
    if not 0 < seconds <= 3600:
        raise ValueError(f"{text} is not a gap between tokens: give more than 0s, at most 3600s")
    return seconds


def format_target_gap(target: TargetGap | None) -> str:
    """As `parse_target_gap` reads it."""
    match target:
        case None:
            return "none"
        case DecodeSteps():
            return str(target)
        case _:
            return f"{target:g}s"


def head_quantization(quantize: Quantization) -> Quantization:
    """What the head is quantized to where the other matrices are `quantize`. It keeps eight bits:
    nothing comes behind it that could make up for what four cost, and where it is tied it is the
    embedding too."""
    return "none" if quantize == "none" else "int8"


def parse_loss_limit(text: str) -> float:
    """A loss that is still accepted, as people write it, as a share: 0.02 of "2%"; infinity of
    "any". Raises ValueError, whose message says what can be written."""
    if text.strip().lower() == "any":
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%?", text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a share in percent: give 2% or 0.5%, or any for no limit"
        )
    return float(match[1]) / 100


def parse_memory(text: str) -> MemorySize:
    """An amount of memory as people write it: "8GiB", "500 MB", "1000000" or "80%". Raises
    ValueError, whose message says what can be written."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*|%)", text.strip().lower())
    if match is None or (match[2] != "%" and match[2] not in UNITS):
        raise ValueError(
            f"{text!r} is not an amount of memory: give bytes (8GiB, 500MB) or a share (80%)"
        )
    number = float(match[1])
    if match[2] == "%":
        if not 0 < number <= 100:
            raise ValueError(f"{text} is not a share of the memory: give above 0%, at most 100%")
        return MemoryShare(number / 100)
    unit = UNITS[match[2]]
    size = int(match[1]) * unit if match[1].isdigit() else int(number * unit)
    if size < 1:
        raise ValueError(f"{text} is less than a byte: give bytes (8GiB, 500MB) or a share (80%)")
    return size
