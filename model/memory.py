"""The memory of a device, and the check that a model fits into it.

On CUDA the driver reports the free memory. On a CPU the free memory is the system's available
memory, or what is left of the container's limit. Both count the memory of other processes as used.
`model/inference/memory.py` counts the memory of slots and steps.
"""

from dataclasses import dataclass

import torch

from logitd.model.device import DeviceError, free_memory, machine_memory
from logitd.model.transformer.config import GPTConfig, ModelConfig
from logitd.model.transformer.size import parameter_count, table_elements

TABLE_BYTES = 12
"""Bytes that an element of a position table takes in total: in the table itself (float32), in its
copy in the model's dtype, and in the decoder's copy."""


@dataclass(frozen=True, slots=True)
class Available:
    """Total and free memory of a device, in bytes."""

    name: str
    total: int
    free: int


def available(device: torch.device) -> Available:
    """The memory of a device at this moment."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Available(str(device), total, free)
    return Available("this machine", machine_memory(), free_memory())


def model_bytes(config: ModelConfig, item_bytes: int) -> int:
    """Bytes that a model's weights and its position tables take."""
    return parameter_count(config) * item_bytes + table_elements(config) * TABLE_BYTES


def check_weights_fit(config: ModelConfig, item_bytes: int, memory: Available) -> None:
    """Raise DeviceError unless a model's weights and tables fit into the free memory."""
    needed = parameter_count(config) * item_bytes
    if needed > memory.free:
        raise DeviceError(
            f"the model's weights take {format_bytes(needed)} ({item_bytes} bytes each), "
            f"but {free_of(memory)}: choose a narrower dtype or another device, or free memory"
        )
    if (whole := model_bytes(config, item_bytes)) > memory.free:
        assert isinstance(config, GPTConfig)  # others have no tables
        raise DeviceError(
            f"the model takes {format_bytes(whole)}, including {format_bytes(whole - needed)} for "
            f"the tables of {config.context_length:,} {config.positions} positions, but "
            f"{free_of(memory)}: lower context_length in its config.json, or free memory"
        )


def format_bytes(count: int) -> str:
    """Format a number of bytes with a unit: "36.0 MiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count} bytes"


def free_of(memory: Available) -> str:
    """A clause for messages that states the free and the total memory."""
    return f"{memory.name} has {format_bytes(memory.free)} free of {format_bytes(memory.total)}"
