"""Memory of slots: the size of a slot and of a step, and how many slots fit next to the weights.

Arithmetic on shapes. The memory of a device and of a model is in `model/memory.py`. Buffers of
libraries and of single kernels are not counted; the unused share of a GPU has to hold them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from logitd.model.device import DeviceError
from logitd.model.inference.options import (
    SERVED_SLOTS,
    KVCacheDType,
    MemoryShare,
    MemorySize,
    SlotDefault,
)
from logitd.model.memory import Available, format_bytes, free_of, model_bytes
from logitd.model.transformer.config import BLOCK, GPTConfig

MAX_SLOTS = 4096
"""Limit of the slots that an amount of memory is divided into."""
SAMPLING_BYTES = 48
"""Bytes for each logit of a row while a GPU samples: a row of float32, its filtered copy, its
order, probabilities and their sums in float64, and masks."""
SCALE_BYTES = 4
"""Bytes of the scale of a head's int8 key or value at one position."""


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """The slots of each model's KV cache: `slots`, or as many as fit into `memory`, the amount for
    all models together; `default` if both are None. At most one of the two is set."""

    slots: int | None = None
    memory: MemorySize | None = None
    default: SlotDefault = SERVED_SLOTS


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a named model: elements have `item_bytes`, `kept` is the dtype of its cache."""

    name: str
    config: GPTConfig
    item_bytes: int
    kept: KVCacheDType = "auto"

    @property
    def weights(self) -> int:
        return model_bytes(self.config, self.item_bytes)

    def slot(self, *, gpu: bool) -> int:
        """Bytes of one slot, with the working memory of a step on a GPU."""
        working = working_bytes(self.config, self.item_bytes) if gpu else 0
        return slot_bytes(self.config, self.item_bytes, self.kept) + working


def slot_bytes(config: GPTConfig, item_bytes: int, kept: KVCacheDType = "auto") -> int:
    """Bytes of the keys and values of all layers in one slot, in elements of `item_bytes` or as
    `kept` says."""
    length = -(-config.context_length // BLOCK) * BLOCK
    row_bytes = config.head_dim + SCALE_BYTES if kept == "int8" else config.head_dim * item_bytes
    return 2 * config.n_layer * config.n_kv_head * length * row_bytes


def working_bytes(config: GPTConfig, item_bytes: int) -> int:
    """Bytes that a step on a GPU needs for each running sequence: a copy of a layer's keys and
    values, and the memory of sampling."""
    return slot_bytes(config, item_bytes) // config.n_layer + SAMPLING_BYTES * config.vocab_size


def divide_slots(
    shapes: Sequence[Shape], budget: SlotBudget, memory: Available, *, gpu: bool
) -> tuple[int, ...]:
    """Slots of each of several models, if `memory.free` is free before any of them is loaded.

    Raises DeviceError if the models do not fit together, or a model has no room for a slot."""
    weights = sum(shape.weights for shape in shapes)
    if weights > memory.free:
        each = ", ".join(f"{shape.name} {format_bytes(shape.weights)}" for shape in shapes)
        raise DeviceError(
            f"the weights of {len(shapes)} models take {format_bytes(weights)} together ({each}), "
            f"{free_of(memory)}: serve fewer, choose a narrower dtype, or free some"
        )
    return slots_for(shapes, budget, replace(memory, free=memory.free - weights), gpu=gpu)


def slots_for(
    shapes: Sequence[Shape], budget: SlotBudget, memory: Available, *, gpu: bool
) -> tuple[int, ...]:
    """Slots of each model, if the weights of all of them leave `memory.free`. Each model gets an
    equal part of an amount of memory.

    Raises DeviceError if the slots do not fit, or a model's part has no room for a slot."""
    sizes = [shape.slot(gpu=gpu) for shape in shapes]
    if budget.memory is not None:
        slots = _slots_in_equal_parts(shapes, budget.memory, memory, gpu=gpu)
    elif budget.slots is not None:
        slots = (budget.slots,) * len(shapes)
    else:
        part = memory.free // len(shapes)
        slots = tuple(_default_slots(budget.default, size, part) for size in sizes)
    total = sum(n * size for n, size in zip(slots, sizes, strict=True))
    if total > memory.free:
        each = ", ".join(
            f"{shape.name}: {n} slots of {format_bytes(size)}"
            for shape, n, size in zip(shapes, slots, sizes, strict=True)
        )
        fit = max(0, memory.free // sum(sizes))
        fix = "lower slots or kv_cache_memory" if fit else "free some, or lower context_length"
        raise DeviceError(
            f"the KV cache takes {format_bytes(total)} ({each}), {free_of(memory)} next to the "
            f"weights; {fit} slots per model fit: {fix}"
        )
    return slots


def _default_slots(default: SlotDefault, slot: int, free: int) -> int:
    if default.share is None:
        return default.most
    return max(1, min(default.most, int(default.share.fraction * free) // slot))


def _slots_in_equal_parts(
    shapes: Sequence[Shape], amount: MemorySize, memory: Available, *, gpu: bool
) -> tuple[int, ...]:
    """Bytes are the size of the caches alone. A share is of all used memory on a GPU, weights
    included, and of the free memory on a CPU."""
    is_share = isinstance(amount, MemoryShare)
    if not isinstance(amount, MemoryShare):
        whole = amount
    elif gpu:
        whole = int(amount.fraction * memory.total) - (memory.total - memory.free)
    else:
        whole = int(amount.fraction * memory.free)
    part = max(0, whole) // len(shapes)
    sizes = [shape.slot(gpu=gpu and is_share) for shape in shapes]
    fix = "raise it, or serve fewer models" if len(shapes) > 1 else "raise it"
    for shape, size in zip(shapes, sizes, strict=True):
        if size > part:
            raise DeviceError(
                f"kv_cache_memory is {amount if is_share else format_bytes(part * len(shapes))}, "
                f"which leaves {format_bytes(part)} for the slots of {shape.name}; one slot of "
                f"{shape.config.context_length} positions takes {format_bytes(size)} "
                f"({free_of(memory)} next to the weights): {fix}"
            )
    return tuple(min(MAX_SLOTS, part // size) for size in sizes)
