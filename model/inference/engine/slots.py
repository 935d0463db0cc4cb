"""SlotPool: which sequence owns which slot of the KV cache, and which tokens each slot holds.

A slot has the keys and values of one sequence. A released slot keeps its contents: `longest_prefix`
finds, among all slots, the one that shares the most whole blocks with a new prompt. A block may be
shared only if prefill would compute the same bits for the same prefix: the scheduler says which.
Accounting alone: the tensors are in `model/inference/kv_cache.py`, copying is the runner's.
"""

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from logitd.model.transformer.config import BLOCK

Block = tuple[int, ...]


@dataclass(slots=True)
class Slot:
    owned: bool = False
    last_used: int = 0  # step at which it was acquired or released
    blocks: list[Block] = field(default_factory=list)  # token ids of the blocks in it


class SlotPool:
    """A fixed number of slots; least recently used ones are taken first."""

    def __init__(self, slots: int) -> None:
        self._slots = [Slot() for _ in range(slots)]

    @property
    def total(self) -> int:
        return len(self._slots)

    @property
    def used(self) -> int:
        return sum(slot.owned for slot in self._slots)

    def longest_prefix(self, token_ids: TokenIds[int]) -> tuple[int, int]:
        """The slot with the most of a prompt's leading blocks, and how many tokens these are.

        At most len(token_ids) - 1 tokens: the last one has to be computed to get its logits.
        (0, 0) when nothing is shared.
        """
        prompt = _blocks(token_ids[: len(token_ids) - 1])
        best, best_length = 0, 0
        for index, slot in enumerate(self._slots):
            shared = 0
            for block, cached in zip(prompt, slot.blocks, strict=False):
                if block != cached:
                    break
                shared += 1
            if shared > best_length:
                best, best_length = index, shared
        return best, best_length * BLOCK

    def acquire(self, step: int, preferred: int | None = None) -> int | None:
        """Take a free slot: `preferred` if it is free, else the least recently used. None when
        all are owned. The slot's contents stay until
        `set_contents`."""
        free = [index for index, slot in enumerate(self._slots) if not slot.owned]
        if not free:
            return None
        if preferred in free:
            index = preferred
        else:
            index = min(free, key=lambda candidate: self._slots[candidate].last_used)
        assert index is not None
        self._slots[index].owned = True
        self._slots[index].last_used = step
        return index

    def set_contents(self, index: int, token_ids: TokenIds[int]) -> None:
        """Declare that a slot now holds exactly these tokens (whole blocks)."""
        assert len(token_ids) % BLOCK == 0
        self._slots[index].blocks = _blocks(token_ids)

    def release(self, index: int, step: int) -> None:
        """Give a slot back; its blocks stay to be shared."""
        assert self._slots[index].owned, f"slot {index} was released twice"
        self._slots[index].owned = False
        self._slots[index].last_used = step

    def forget(self) -> None:
        """Drop all that could be shared: the weights that computed it are gone."""
        for slot in self._slots:
            slot.blocks = []

    def owned(self) -> set[int]:
        return {index for index, slot in enumerate(self._slots) if slot.owned}


def _blocks(token_ids: TokenIds[int]) -> list[Block]:
    """Whole blocks of a token list; a shorter rest is left out."""
    return [
        tuple(token_ids[start : start + BLOCK])
        for start in range(0, len(token_ids) - BLOCK + 1, BLOCK)
    ]
