"""Memory: what a device has, and whether a model fits into it.

Arithmetic on shapes, and one look at the device. On CUDA "free" is what its driver says. On a CPU
it is what the system says can be taken now, or what is left of the container's limit: so other
processes' memory counts on both. Slots and steps: `model/inference/memory.py`.
"""

from dataclasses import dataclass

import torch

from logitd.model.device import DeviceError, free_memory, machine_memory
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.size import parameter_count, table_elements

TABLE_BYTES = 12
"""Of an element of a table: float32, a copy in the model's dtype, and one for the decoder."""


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes of a device: all of them, and those that are free."""

    name: str
    total: int
    free: int


def available(device: torch.device) -> Available:
    """The memory of a device, as it is now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Available(str(device), total, free)
    return Available("this machine", machine_memory(), free_memory())


def model_bytes(config: GPTConfig, item_bytes: int) -> int:
    """Bytes of a model's weights, and of the tables that it computes of its positions."""
    return parameter_count(config) * item_bytes + table_elements(config) * TABLE_BYTES


def check_weights_fit(config: GPTConfig, item_bytes: int, memory: Available) -> None:
    """Raise DeviceError unless a model's weights and tables fit into the free memory."""
    needed = parameter_count(config) * item_bytes
    if needed > memory.free:
        raise DeviceError(
            f"the model's weights take {format_bytes(needed)} at {item_bytes} bytes each, "
            f"{free_of(memory)}: choose a narrower dtype, another device, or free some"
        )
    if (whole := model_bytes(config, item_bytes)) > memory.free:
        raise DeviceError(
            f"the model takes {format_bytes(whole)}, {format_bytes(whole - needed)} of them tables "
            f"for a context of {config.context_length:,} {config.positions} positions, "
            f"{free_of(memory)}: lower context_length in its config.json, or free some"
        )


def format_bytes(count: int) -> str:
    """Bytes for people: "36.0 MiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count} bytes"


def free_of(memory: Available) -> str:
    """What is free, for people."""
    return f"{memory.name} has {format_bytes(memory.free)} free of {format_bytes(memory.total)}"
