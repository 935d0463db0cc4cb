"""Sharing: the slots of several models on one device, settled before any weights are read.

A number of slots is each model's own; an amount of memory is that of all KV caches together, and
each model's has an equal part of it. Where neither is given, each has its default in an equal part
of what all weights leave. What all take is held against what is free. Arithmetic on
shapes. One model by itself is the business of `slots_for` (`model/inference/memory.py`), which is
asked again while each is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from logitd.model.device import DeviceError
from logitd.model.inference.memory import (
    MAX_SLOTS,
    SlotBudget,
    default_slots,
    slot_bytes,
    working_bytes,
)
from logitd.model.inference.options import KVCacheDType, MemoryShare, SlotDefault
from logitd.model.memory import Available, format_bytes, free_of, model_bytes
from logitd.model.transformer.config import GPTConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model of this name takes memory for; elements have `item_bytes`, and keys and values
    are as they are `kept`."""

    name: str
    config: GPTConfig
    item_bytes: int
    kept: KVCacheDType = "auto"

    @property
    def weights(self) -> int:
        """Bytes of its weights and tables."""
        return model_bytes(self.config, self.item_bytes)

    def slot(self, *, gpu: bool) -> int:
        """Bytes of one of its slots, with what a step on a GPU takes besides."""
        working = working_bytes(self.config, self.item_bytes) if gpu else 0
        return slot_bytes(self.config, self.item_bytes, self.kept) + working


def divide_slots(
    shapes: Sequence[Shape],
    budget: SlotBudget,
    memory: Available,
    *,
    default: SlotDefault,
    gpu: bool,
) -> tuple[int, ...]:
    """How many slots each model gets, where `memory.free` is free before any of them is loaded.

    Raises DeviceError where they do not fit together, or a model's part has no room for a slot."""
    weights = sum(shape.weights for shape in shapes)
    if weights > memory.free:
        told = ", ".join(f"{shape.name} {format_bytes(shape.weights)}" for shape in shapes)
        raise DeviceError(
            f"the weights of {len(shapes)} models take {format_bytes(weights)} together ({told}), "
            f"{free_of(memory)}: serve fewer, choose a narrower dtype, or free some"
        )
    if budget.memory is None:
        part = (memory.free - weights) // len(shapes)
        slots = tuple(
            default_slots(default, shape.slot(gpu=gpu), part)
            if budget.slots is None
            else budget.slots
            for shape in shapes
        )
    else:
        slots = _in_equal_parts(shapes, budget, memory, weights, gpu=gpu)
    caches = [n * shape.slot(gpu=gpu) for n, shape in zip(slots, shapes, strict=True)]
    if weights + sum(caches) > memory.free:
        told = ", ".join(
            f"{shape.name} {format_bytes(shape.weights)} of weights and {format_bytes(cache)} for "
            f"{n} slots"
            for n, shape, cache in zip(slots, shapes, caches, strict=True)
        )
        raise DeviceError(
            f"{len(shapes)} models take {format_bytes(weights + sum(caches))} together ({told}), "
            f"{free_of(memory)}. Lower slots or kv_cache_memory, or serve fewer"
        )
    return slots


def _in_equal_parts(
    shapes: Sequence[Shape], budget: SlotBudget, memory: Available, weights: int, *, gpu: bool
) -> tuple[int, ...]:
    """As many slots of each model as fit into its part of an amount of memory."""
    left = memory.free - weights
    match budget.memory:
        case MemoryShare(fraction) if gpu:
            whole = int(fraction * memory.total) - (memory.total - left)
        case MemoryShare(fraction):
            whole = int(fraction * left)
        case int(size):
            whole = size
    part = max(0, whole) // len(shapes)
    # An amount in bytes is that of the caches; a share is of all that is used.
    sizes = [shape.slot(gpu=gpu and isinstance(budget.memory, MemoryShare)) for shape in shapes]
    for shape, size in zip(shapes, sizes, strict=True):
        if size > part:
            raise DeviceError(
                f"kv_cache_memory is {_told(budget)}, which leaves each of {len(shapes)} models "
                f"{format_bytes(part)} for slots, and one of {shape.name} takes "
                f"{format_bytes(size)}: raise it, or serve fewer"
            )
    return tuple(min(MAX_SLOTS, part // size) for size in sizes)


def _told(budget: SlotBudget) -> str:
    return (
        str(budget.memory)
        if isinstance(budget.memory, MemoryShare)
        else (format_bytes(budget.memory or 0))
    )
