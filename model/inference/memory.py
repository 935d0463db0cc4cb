"""Memory of slots: what a slot and a step take, and how many slots fit beside a model.

Arithmetic on shapes; what a device has and a model takes is in `model/memory.py`. Left out are the
buffers of libraries and of single kernels; the share of a GPU that is left unused has to hold them.
"""

from dataclasses import dataclass

from logitd.model.device import DeviceError
from logitd.model.inference.options import KVCacheDType, MemoryShare, MemorySize, SlotDefault
from logitd.model.memory import Available, format_bytes, free_of
from logitd.model.transformer.config import BLOCK, GPTConfig

MAX_SLOTS = 4096
"""The most slots that are made of an amount of memory."""
SAMPLING_BYTES = 48
"""Of each logit of a row while tokens are sampled on a GPU: a row of float32, its filtered copy,
its order, probabilities and their sums in float64, and masks."""


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """How many slots the KV cache gets: `slots`, or as many as fit into `memory`. At most one of
    them is given."""

    slots: int | None = None
    memory: MemorySize | None = None


SCALE_BYTES = 4
"""Of a head's key or value of a position, beside its elements in int8."""


def slot_bytes(config: GPTConfig, item_bytes: int, kept: KVCacheDType = "auto") -> int:
    """Bytes of one slot: keys and values of all layers, in elements of `item_bytes` each or as they
    are `kept`."""
    length = -(-config.context_length // BLOCK) * BLOCK
    row_bytes = config.head_dim + SCALE_BYTES if kept == "int8" else config.head_dim * item_bytes
    return 2 * config.n_layer * config.n_kv_head * length * row_bytes


def working_bytes(config: GPTConfig, item_bytes: int) -> int:
    """Bytes that a step on a GPU takes besides for each running sequence: a copy of a layer's keys
    and values, and what sampling takes."""
    return slot_bytes(config, item_bytes) // config.n_layer + SAMPLING_BYTES * config.vocab_size


def slots_for(
    budget: SlotBudget,
    config: GPTConfig,
    item_bytes: int,
    memory: Available,
    *,
    default: SlotDefault,
    gpu: bool,
    kept: KVCacheDType = "auto",
) -> int:
    """How many slots a budget allows, where `memory.free` is what the weights leave.

    Raises DeviceError where not even one fits, or fewer than were asked for."""
    cache_bytes = slot_bytes(config, item_bytes, kept)
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
            asked = budget.slots
            slots = default_slots(default, used_bytes, memory.free) if asked is None else asked
    if slots * used_bytes > memory.free:
        fit = max(0, memory.free // used_bytes)
        way_out = "Lower slots or kv_cache_memory" if fit else "Free some, or lower context_length"
        raise DeviceError(
            f"{slots} slots take {format_bytes(slots * used_bytes)} ({format_bytes(used_bytes)} "
            f"each), {free_of(memory)} beside the weights: {fit} fit. {way_out}"
        )
    return slots


def default_slots(default: SlotDefault, used_bytes: int, free: int) -> int:
    """How many slots of `used_bytes` each there are where nobody says it, of `free` bytes."""
    if default.share is None:
        return default.most
    return max(1, min(default.most, int(default.share.fraction * free) // used_bytes))


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
