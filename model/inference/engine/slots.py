"""SlotPool: records which sequence owns each slot of the KV cache, and which tokens the slot holds.

A slot holds the keys and values of one sequence. A released slot keeps its contents, so
`longest_prefix` searches all slots for the one that shares the most whole blocks with a prompt. The
scheduler shares only blocks that prefill would compute with the same bits. The tensors are in
`model/inference/kv_cache.py`, and the runner copies them.
"""

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from logitd.model.transformer.config import BLOCK

Block = tuple[int, ...]


@dataclass(slots=True)
class Slot:
    owned: bool = False
    last_used: int = 0  # step of its last acquisition or release
    blocks: list[Block] = field(default_factory=list)  # token ids of the blocks in it


class SlotPool:
    """A fixed number of slots. The least recently used free slot is taken first."""

    def __init__(self, slots: int) -> None:
        self._slots = [Slot() for _ in range(slots)]

    @property
    def total(self) -> int:
        return len(self._slots)

    @property
    def used(self) -> int:
        return len(self.owned())

    def longest_prefix(self, token_ids: TokenIds[int]) -> tuple[int, int]:
        """The slot that shares the most leading blocks with a prompt, and the number of tokens in
        them; (0, 0) if none does. The last token is never shared, because its logits are needed."""
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

    def acquire(self, step: int, preferred: int | None = None) -> int:
        """Take a free slot: `preferred` if free, otherwise the least recently used one. At least
        one slot must be free. The slot keeps its contents until `set_contents`."""
        free = [index for index, slot in enumerate(self._slots) if not slot.owned]
        if preferred is None or preferred not in free:
            preferred = min(free, key=lambda candidate: self._slots[candidate].last_used)
        self._slots[preferred].owned = True
        self._slots[preferred].last_used = step
        return preferred

    def set_contents(self, index: int, token_ids: TokenIds[int]) -> None:
        """Record that a slot holds exactly these tokens, a whole number of blocks."""
        assert len(token_ids) % BLOCK == 0
        self._slots[index].blocks = _blocks(token_ids)

    def release(self, index: int, step: int) -> None:
        """Free a slot. Its blocks can still be shared."""
        assert self._slots[index].owned, f"slot {index} was released twice"
        self._slots[index].owned = False
        self._slots[index].last_used = step

    def forget(self) -> None:
        """Forget which blocks the slots hold, because the weights changed or a step failed."""
        for slot in self._slots:
            slot.blocks = []

    def owned(self) -> set[int]:
        return {index for index, slot in enumerate(self._slots) if slot.owned}


def _blocks(token_ids: TokenIds[int]) -> list[Block]:
    return [
        tuple(token_ids[start : start + BLOCK])
        for start in range(0, len(token_ids) - BLOCK + 1, BLOCK)
    ]
