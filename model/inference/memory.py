"""Memory: what a model, a slot and a step take, what a device has, and how many slots fit.

Arithmetic on shapes, and one look at the device. On CUDA "free" is what its driver says, so other
processes' memory counts. On a CPU it is the memory of the machine, or of the container, less the
weights: what other processes take there comes and goes. Left out are the buffers of libraries and
of single kernels; the share of a GPU that is left unused has to hold them.
"""

from dataclasses import dataclass

import torch

from model.device import DeviceError, machine_memory
from model.inference.options import MemoryShare, MemorySize
from model.transformer.config import BLOCK, GPTConfig
from model.transformer.size import parameter_count

MAX_SLOTS = 4096
"""The most slots that are made of an amount of memory."""
SAMPLING_BYTES = 48
"""Of each logit of a row while tokens are sampled on a GPU: a row of float32, its filtered copy,
its order, probabilities and their sums in float64, and masks."""


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes of a device: all of them, and those that are free."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """How many slots the KV cache gets: `slots`, or as many as fit into `memory`. At most one of
    them is given."""

    slots: int | None = None
    memory: MemorySize | None = None


def slot_bytes(config: GPTConfig, item_bytes: int) -> int:
    """Bytes of one slot: keys and values of all layers, in elements of `item_bytes` each."""
    length = -(-config.context_length // BLOCK) * BLOCK
    return 2 * config.n_layer * config.kv_width * length * item_bytes


def working_bytes(config: GPTConfig, item_bytes: int) -> int:
    """Bytes that a step on a GPU takes besides for each running sequence: a copy of a layer's keys
    and values, and what sampling takes."""
    return slot_bytes(config, item_bytes) // config.n_layer + SAMPLING_BYTES * config.vocab_size


def check_weights_fit(config: GPTConfig, item_bytes: int, memory: Available) -> None:
    """Raise DeviceError unless a model's weights fit into the free memory."""
    needed = parameter_count(config) * item_bytes
    if needed > memory.free:
        raise DeviceError(
            f"the model's weights take {format_bytes(needed)} at {item_bytes} bytes each, "
            f"{_free(memory)}: choose a narrower dtype, another device, or free some"
        )


def slots_for(
    budget: SlotBudget,
    config: GPTConfig,
    item_bytes: int,
    memory: Available,
    *,
    default: int,
    gpu: bool,
) -> int:
    """How many slots a budget allows, where `memory.free` is what the weights leave.

    Raises DeviceError where not even one fits, or fewer than were asked for."""
    cache_bytes = slot_bytes(config, item_bytes)
    used_bytes = cache_bytes + (working_bytes(config, item_bytes) if gpu else 0)
    match budget.memory:
        case MemoryShare() as share:
            return _slots_in_share(share, used_bytes, memory, gpu=gpu)
        case int(size):
            slots = min(MAX_SLOTS, size // cache_bytes)
            if slots == 0:
                raise DeviceError(
                    f"kv_cache_memory is {format_bytes(size)}, and one slot of "
                    f"{config.context_length} positions takes {format_bytes(cache_bytes)}: raise it"
                )
        case None:
            slots = default if budget.slots is None else budget.slots
    if slots * used_bytes > memory.free:
        raise DeviceError(
            f"{slots} slots take {format_bytes(slots * used_bytes)} ({format_bytes(used_bytes)} "
            f"each), {_free(memory)} beside the weights: {memory.free // used_bytes} fit. "
            "Lower slots or kv_cache_memory"
        )
    return slots


def _slots_in_share(share: MemoryShare, used_bytes: int, memory: Available, *, gpu: bool) -> int:
    """As many slots as bring a GPU's use up to a share of it, or take a share of a CPU's free
    memory."""
    if gpu:
        whole, taken = memory.total, memory.total - memory.free
        present = (
            f"of {memory.name}, where {format_bytes(taken)} of {format_bytes(memory.total)} are "
            "used (weights included)"
        )
    else:
        whole, taken = memory.free, 0
        present = f"of the {format_bytes(memory.free)} that the weights leave of {memory.name}"
    limit = int(share.fraction * whole)
    slots = min(MAX_SLOTS, (limit - taken) // used_bytes)
    if slots < 1:
        raise DeviceError(
            f"kv_cache_memory is {share}: {format_bytes(limit)} {present}, and one slot takes "
            f"{format_bytes(used_bytes)}: raise it, or free some"
        )
    return slots


def available(device: torch.device, *, weight_bytes: int = 0) -> Available:
    """The memory of a device. `weight_bytes` are those of a model that is loaded already: on a CPU
    they are subtracted, a GPU's driver counts them."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Available(str(device), total, free)
    total = machine_memory()
    return Available("this machine", total, max(0, total - weight_bytes))


def format_bytes(count: int) -> str:
    """Bytes for people: "36.0 MiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count} bytes"


def _free(memory: Available) -> str:
    return f"{memory.name} has {format_bytes(memory.free)} free of {format_bytes(memory.total)}"
