"""Memory: what a model, a slot and a step take, what there is, and how many slots that makes.

Arithmetic on shapes, and one look at the device. On CUDA "free" is what its driver says, so what
other processes hold counts. On a CPU it is the memory of the machine, or of the container, less the
weights: what others hold there comes and goes. Left out are the buffers of libraries and of single
kernels; the share of a GPU that is not asked for has to hold them.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from model.device import DeviceError
from model.transformer.config import BLOCK, GPTConfig
from model.transformer.gpt import VALUE_GATE_WIDTH

MOST_SLOTS = 4096
"""More are never made of memory alone."""
DRAW_BYTES = 48
"""Of each logit of a row while tokens are drawn on a GPU: a row of float32, what is left of it,
its order, probabilities and their sums in float64, and masks."""
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes of a device: all of them, and those that can be had now."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class SlotWish:
    """How many slots there are to be: a number, or as many as some bytes of keys and values give,
    or as many as fill a share of a GPU. At most one of them is given."""

    slots: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None


def parameter_count(config: GPTConfig) -> int:
    """Learned numbers of a model of this shape, without making one."""
    norm = config.d_model * (2 if config.norm == "layernorm" and config.bias else 1)
    up = config.d_ff * (2 if config.activation == "swiglu" else 1)
    heads = config.n_head * config.head_dim
    block = (
        2 * norm
        + config.qkv_width * (config.d_model + config.qkv_bias)
        + 2 * config.head_dim * config.qk_norm
        + config.d_model * (heads + config.bias)
        + up * (config.d_model + config.bias)
        + config.d_model * (config.d_ff + config.bias)
    )
    valued = sum(config.has_value_embedding(layer) for layer in range(config.n_layer))
    value_embedding = (
        config.padded_vocab_size * config.kv_width
        + min(VALUE_GATE_WIDTH, config.d_model) * config.n_kv_head
    )
    embeddings = config.padded_vocab_size * (1 if config.tied_head else 2)
    embeddings += config.context_length * (config.positions == "learned")
    return (
        config.n_layer * block
        + valued * value_embedding
        + embeddings * config.d_model
        + norm * (config.norm_position == "pre")
    )


def slot_bytes(config: GPTConfig, item_bytes: int) -> int:
    """Keys and values of one slot in all layers, in numbers of `item_bytes` each."""
    length = -(-config.context_length // BLOCK) * BLOCK
    return 2 * config.n_layer * config.kv_width * length * item_bytes


def working_bytes(config: GPTConfig, item_bytes: int) -> int:
    """What a step on a GPU needs besides for each sequence that runs: a copy of a layer's keys and
    values, and the draw."""
    return slot_bytes(config, item_bytes) // config.n_layer + DRAW_BYTES * config.vocab_size


def check_weights_fit(config: GPTConfig, item_bytes: int, there: Available) -> None:
    """Raise DeviceError unless a model's weights fit into what is free."""
    needed = parameter_count(config) * item_bytes
    if needed > there.free:
        raise DeviceError(
            f"the model's weights take {spoken(needed)} in numbers of {item_bytes} bytes, "
            f"{_free(there)}: choose narrower numbers (dtype), another device, or free some"
        )


def slots_for(
    wish: SlotWish, config: GPTConfig, item_bytes: int, there: Available, *, default: int, gpu: bool
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
                f"kv_cache_bytes is {spoken(wish.kv_cache_bytes)}, and one slot of "
                f"{config.context_length} positions takes {spoken(one)}: raise it"
            )
    if slots * each > there.free:
        raise DeviceError(
            f"{slots} slots take {spoken(slots * each)} ({spoken(each)} each), {_free(there)} "
            f"beside the weights: {there.free // each} fit. Ask for fewer (slots, kv_cache_bytes)"
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
            f"gpu_memory_utilization is {share:g}: {spoken(int(share * there.total))} of "
            f"{there.name}, where {spoken(used)} of {spoken(there.total)} are used, the weights "
            f"among them, and one slot takes {spoken(each)}: raise it, or free some"
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


def machine_memory(limits: tuple[Path, ...] = CONTAINER_LIMITS) -> int:
    """Bytes of memory that this process may come to have: the machine's, or the container's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        try:
            said = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if said.isdecimal():  # else "max": there is no limit
            total = min(total, int(said))
    return total


def spoken(count: int) -> str:
    """Bytes for people: "36.0 MiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count} bytes"


def _free(there: Available) -> str:
    return f"{there.name} has {spoken(there.free)} free of {spoken(there.total)}"
