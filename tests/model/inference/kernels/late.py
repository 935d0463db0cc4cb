"""A late device: what it is given is done when somebody waits for it, in the order it came in.

So on a CPU too, whoever reads a result without waiting for it gets an old one, and whoever writes
into a buffer that a copy has yet to read sends something else. What is not given to it, but
computed at once, comes behind all that it was given before, as on a device's one stream.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.inference.kernels.base import Prefilled, PrefillInput
from logitd.model.inference.kernels.cuda import pinned
from logitd.model.inference.kernels.cuda.capture import Compute
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.cuda.pinned import Buffer
from logitd.model.inference.kv_cache import KVCache
from logitd.model.transformer.gpt import GPT


class LateDevice:
    """A queue of work; a `Capture`, too."""

    def __init__(self) -> None:
        self._queue: deque[Compute] = deque()
        self.done = 0

    @property
    def given(self) -> int:
        """Amount of work given so far."""
        return self.done + len(self._queue)

    def idle(self) -> bool:
        return not self._queue

    def give(self, work: Compute) -> int:
        """Queue some work; the mark behind it."""
        self._queue.append(work)
        return self.given

    def wait(self, mark: int) -> None:
        with torch.inference_mode():
            while self.done < mark:
                self.done += 1
                self._queue.popleft()()

    def finish(self) -> None:
        self.wait(self.given)

    def record(self, compute: Compute) -> Compute:
        def replay() -> None:
            self.give(compute)

        return replay


class LateBuffer(Buffer):
    """Pinned memory of a late device."""

    def __init__(self, late: LateDevice, device: torch.device, *shape: int) -> None:
        super().__init__(device, *shape)
        self._late, self._mark = late, 0

    def wait(self) -> None:
        self._late.wait(self._mark)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        copy = super()._copy
        self._mark = self._late.give(lambda: copy(target, source))


class LateDecoder(GraphDecoder):
    """A graph decoder whose steps are done late."""

    def __init__(self, late: LateDevice, gpt: GPT, cache: KVCache, **options: Any) -> None:
        with late_buffers(late):
            super().__init__(gpt, cache, capture=late, **options)
        self.late = late
        clear_behind, copy_prefix = cache.clear_behind, cache.copy_prefix

        def clear(slot: int, length: int) -> None:
            if cache._written[slot] > length:
                late.finish()
            clear_behind(slot, length)

        def copy(source: int, target: int, length: int) -> None:
            late.finish()
            copy_prefix(source, target, length)

        cache.clear_behind = clear  # type: ignore[method-assign]
        cache.copy_prefix = copy  # type: ignore[method-assign]

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        self.late.finish()
        return super().prefill(pieces)

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        logits = super().decode(token_ids, slots, positions)
        self.late.finish()  # whoever gets them computes with them at once
        return logits


@contextmanager
def late_buffers(late: LateDevice) -> Iterator[None]:
    """Make buffers of a late device inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "Buffer", partial(LateBuffer, late))
        yield
