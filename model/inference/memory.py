"""Memory: what a model, a slot and a step take, what there is, and how many slots that makes.

Arithmetic on shapes, and one look at the device. On CUDA "free" is what its driver says, so what
other processes hold counts. On a CPU it is the memory of the machine, or of the container, less the
weights: what others hold there comes and goes. Left out are the buffers of libraries and of single
kernels; the share of a GPU that is not asked for has to hold them.
"""

from dataclasses import dataclass

import torch

from model.device import DeviceError, machine_memory
from model.transformer.config import BLOCK, GPTConfig
from model.transformer.size import parameter_count

MOST_SLOTS = 4096
"""More are never made of memory alone."""
SAMPLING_BYTES = 48
"""Of each logit of a row while tokens are sampled on a GPU: a row of float32, its filtered copy,
its order, probabilities and their sums in float64, and masks."""


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes of a device: all of them, and those that can be had now."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """How many slots there are to be: a number, or as many as some bytes of keys and values give,
    or as many as fill a share of a GPU. At most one of them is given."""

    slots: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None


def slot_bytes(config: GPTConfig, item_bytes: int) -> int:
    """Keys and values of one slot in all layers, in numbers of `item_bytes` each."""
    length = -(-config.context_length // BLOCK) * BLOCK
    return 2 * config.n_layer * config.kv_width * length * item_bytes


def working_bytes(config: GPTConfig, item_bytes: int) -> int:
    """What a step on a GPU needs besides for each sequence that runs: a copy of a layer's keys and
    values, and what sampling takes."""
    return slot_bytes(config, item_bytes) // config.n_layer + SAMPLING_BYTES * config.vocab_size


def check_weights_fit(config: GPTConfig, item_bytes: int, there: Available) -> None:
    """Raise DeviceError unless a model's weights fit into what is free."""
    needed = parameter_count(config) * item_bytes
    if needed > there.free:
        raise DeviceError(
            f"the model's weights take {format_bytes(needed)} at {item_bytes} bytes each, "
            f"{_free(there)}: choose a narrower dtype, another device, or free some"
        )


def slots_for(
    wish: SlotBudget,
    config: GPTConfig,
    item_bytes: int,
    there: Available,
    *,
    default: int,
    gpu: bool,
) -> int:
    """How many slots a wish makes, where `there.free` is what the weights have left.

    Raises DeviceError where not even one fits, or not as many as were asked for."""
    one = slot_bytes(config, item_bytes)
    each = one + (working_bytes(config, item_bytes) if gpu else 0)
    if wish.gpu_memory_utilization is not None:
        return _filling(wish.gpu_memory_utilization, each, there, gpu=gpu)
    slots = default if wish.slots is None else wish.slots
    if wish.kv_cache_bytes is not None:
        slots = min(MOST_SLOTS, wish.kv_cache_bytes // one)
        if slots == 0:
            raise DeviceError(
                f"kv_cache_bytes is {format_bytes(wish.kv_cache_bytes)}, and one slot of "
                f"{config.context_length} positions takes {format_bytes(one)}: raise it"
            )
    if slots * each > there.free:
        raise DeviceError(
            f"{slots} slots take {format_bytes(slots * each)} ({format_bytes(each)} each), "
            f"{_free(there)} beside the weights: {there.free // each} fit. "
            "Ask for fewer (slots, kv_cache_bytes)"
        )
    return slots


def _filling(share: float, each: int, there: Available, *, gpu: bool) -> int:
    """As many slots as bring what is used of a GPU up to a share of it."""
    if not gpu:
        raise DeviceError(
            f"gpu_memory_utilization is a share of a GPU, and the device is {there.name}: ask for "
            "a number of slots or for kv_cache_bytes"
        )
    used = there.total - there.free
    slots = min(MOST_SLOTS, (int(share * there.total) - used) // each)
    if slots < 1:
        raise DeviceError(
            f"gpu_memory_utilization is {share:g}: {format_bytes(int(share * there.total))} of "
            f"{there.name}, where {format_bytes(used)} of {format_bytes(there.total)} are used "
            f"(weights included), and one slot takes {format_bytes(each)}: raise it, or free some"
        )
    return slots


def available(device: torch.device, *, weight_bytes: int = 0) -> Available:
    """What a device has. `weight_bytes` are those of a model that is already there: on a CPU they
    are taken off, a GPU's driver knows."""
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


def _free(there: Available) -> str:
    return f"{there.name} has {format_bytes(there.free)} free of {format_bytes(there.total)}"
