"""Processor: the instruction sets of the processor, as Linux names them. Does not import torch.

`model/device.py` counts the processors that a process may use;
`model/inference/kernels/cpu/targets.py` has the instruction sets for which kernels can be built.
"""

from collections.abc import Collection
from pathlib import Path

BFLOAT16_INSTRUCTIONS = {
    "amx_bf16": "AMX-BF16",
    "avx512_bf16": "AVX-512 BF16",
    "bf16": "Arm BF16",
}
"""The processor features that provide bfloat16 dot products: Linux's name for each, and the usual
name of its instructions."""


def processor_features() -> frozenset[str]:
    """The features of this processor; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def bfloat16_instructions(features: Collection[str]) -> str | None:
    """The name of the instructions that multiply bfloat16 on a processor with these features, or
    None if there are no such instructions."""
    return next(
        (name for feature, name in BFLOAT16_INSTRUCTIONS.items() if feature in features), None
    )
