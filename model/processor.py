"""The processor: what it can do, in Linux's words. Without torch.

Not here: how many of them a process may use (`model/device.py`), and what kernels are built for
(`model/inference/kernels/cpu/targets.py`).
"""

from collections.abc import Collection
from pathlib import Path

BFLOAT16_INSTRUCTIONS = {
    "amx_bf16": "AMX-BF16",
    "avx512_bf16": "AVX-512 BF16",
    "bf16": "Arm BF16",
}
"""Features of processors that have dot products of bfloat16, with their names for people."""


def processor_features() -> frozenset[str]:
    """What the processor can do, in Linux's words; nothing where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def bfloat16_instructions(features: Collection[str]) -> str | None:
    """What a processor of these features multiplies bfloat16 with, or None."""
    return next(
        (name for feature, name in BFLOAT16_INSTRUCTIONS.items() if feature in features), None
    )
