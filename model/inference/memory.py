"""Memory of slots: the size of a slot and of a step, and the number of slots that fit alongside the
weights.

These are computed from shapes. `model/memory.py` computes the memory of a device and of a model.
Buffers of libraries and of single kernels are not counted; on a GPU they must fit into the share of
memory that is left unused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from logitd.model.device import DeviceError
from logitd.model.inference.options import (
    CODE_SLOTS,
    SERVED_SLOTS,
    KVCacheDType,
    MemoryShare,
    MemorySize,
    SlotDefault,
)
from logitd.model.memory import Available, format_bytes, free_of, model_bytes
from logitd.model.owner_code.config import CodeConfig
from logitd.model.transformer.config import BLOCK, ModelConfig

MAX_SLOTS = 4096
"""Maximum number of slots of a model if the setting is an amount of memory."""
SAMPLING_BYTES = 48
"""Bytes that a GPU needs per logit to sample a row: for the row in float32, its filtered copy, its
sorted order, its probabilities and their sums in float64, and masks."""
ID_BYTES = 8
"""Bytes of a token id in a slot."""
SCALE_BYTES = 4
"""Bytes of the scale of a head's int8 key or value at one position."""


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """The number of slots of each model's KV cache: `slots`, or as many as fit into `memory`, which
    is shared by all models. At most one of the two is set; if neither is set, `default` applies."""

    slots: int | None = None
    memory: MemorySize | None = None
    default: SlotDefault = SERVED_SLOTS


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model: its shape, the bytes of an element of its weights, and the dtype of its
    cache (`kept`)."""

    name: str
    config: ModelConfig
    item_bytes: int
    kept: KVCacheDType = "auto"

    @property
    def weights(self) -> int:
        return model_bytes(self.config, self.item_bytes)

    def slot(self, *, gpu: bool) -> int:
        """Bytes of one slot; on a GPU these include its part of a step's working memory."""
        working = working_bytes(self.config, self.item_bytes) if gpu else 0
        return slot_bytes(self.config, self.item_bytes, self.kept) + working


def slot_bytes(config: ModelConfig, item_bytes: int, kept: KVCacheDType = "auto") -> int:
    """Bytes of one slot. It holds the keys and values of all layers, and also token ids if the
    model has `smear`. If the owner's code computes the model, the slot holds only token ids."""
    if isinstance(config, CodeConfig):
        return config.context_length * ID_BYTES
    length = -(-config.context_length // BLOCK) * BLOCK
    row_bytes = config.head_dim + SCALE_BYTES if kept == "int8" else config.head_dim * item_bytes
    return 2 * config.n_layer * config.n_kv_head * length * row_bytes + 4 * length * config.smear


def working_bytes(config: ModelConfig, item_bytes: int) -> int:
    """Bytes that a step on a GPU needs per running sequence: a copy of one layer's keys and values,
    and the memory of sampling."""
    return (
        slot_bytes(config, item_bytes) // max(1, config.n_layer)
        + SAMPLING_BYTES * config.vocab_size
    )


def divide_slots(
    shapes: Sequence[Shape], budget: SlotBudget, memory: Available, *, gpu: bool
) -> tuple[int, ...]:
    """Number of slots of each model. `memory.free` is the free memory before any model is loaded.

    Raises DeviceError if the models do not all fit into memory, or if a model has no room for a
    slot."""
    weights = sum(shape.weights for shape in shapes)
    if weights > memory.free:
        each = ", ".join(f"{shape.name} {format_bytes(shape.weights)}" for shape in shapes)
        raise DeviceError(
            f"the weights of {len(shapes)} models take {format_bytes(weights)} together ({each}), "
            f"but {free_of(memory)}: serve fewer models, choose a narrower dtype, or free memory"
        )
    return slots_for(shapes, budget, replace(memory, free=memory.free - weights), gpu=gpu)


def slots_for(
    shapes: Sequence[Shape], budget: SlotBudget, memory: Available, *, gpu: bool
) -> tuple[int, ...]:
    """Number of slots of each model. `memory.free` is the memory that the weights of all models
    leave free. An amount of memory is divided equally between the models.

    Raises DeviceError if the slots do not fit, or if a model's part of the memory has no room for a
    slot."""
    sizes = [shape.slot(gpu=gpu) for shape in shapes]
    if budget.memory is not None:
        slots = _slots_in_equal_parts(shapes, budget.memory, memory, gpu=gpu)
    elif budget.slots is not None:
        slots = (budget.slots,) * len(shapes)
    else:
        part = memory.free // len(shapes)
        slots = tuple(
            _default_slots(default_for(shape.config, budget.default), size, part)
            for shape, size in zip(shapes, sizes, strict=True)
        )
    total = sum(n * size for n, size in zip(slots, sizes, strict=True))
    if total > memory.free:
        each = ", ".join(
            f"{shape.name}: {n} slots of {format_bytes(size)}"
            for shape, n, size in zip(shapes, slots, sizes, strict=True)
        )
        fit = max(0, memory.free // sum(sizes))
        fix = "lower slots or kv_cache_memory" if fit else "free memory, or lower context_length"
        raise DeviceError(
            f"the KV cache takes {format_bytes(total)} ({each}), but {free_of(memory)} besides "
            f"the weights; {fit} slots per model fit: {fix}"
        )
    return slots


def default_for(config: ModelConfig, default: SlotDefault) -> SlotDefault:
    """The default number of slots of a model. On a server, a model that its owner's code computes
    gets at most CODE_SLOTS."""
    if default.share is None or not isinstance(config, CodeConfig):
        return default
    return replace(default, most=min(default.most, CODE_SLOTS))


def _default_slots(default: SlotDefault, slot: int, free: int) -> int:
    if default.share is None:
        return default.most
    return max(1, min(default.most, int(default.share.fraction * free) // slot))


def _slots_in_equal_parts(
    shapes: Sequence[Shape], amount: MemorySize, memory: Available, *, gpu: bool
) -> tuple[int, ...]:
    """Number of slots of each model if the setting is an amount of memory. An amount in bytes is
    the size of the caches alone. On a GPU a share includes the weights and all other used memory;
    on a CPU it is a share of the free memory."""
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
