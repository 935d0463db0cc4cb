"""A simulated late device: a stream that does its work, in order, only when a caller waits for it.
So tests on a CPU, too, notice a caller that reads a result without waiting: the result is stale."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from logitd.model.inference.kernels.base import Prefilled, PrefillInput
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.cuda.stream import Compute, Download, Integers
from logitd.model.inference.kv_cache import KVCache
from logitd.model.transformer.gpt import GPT
from tests.model.inference.kernels.graphs import TorchForward


class LateDevice:
    """A queue of work that serves as a `Stream`."""

    def __init__(self) -> None:
        self._queue: deque[Compute] = deque()
        self.done = 0

    @property
    def given(self) -> int:
        """The number of work items queued so far, including the finished ones."""
        return self.done + len(self._queue)

    def idle(self) -> bool:
        return not self._queue

    def wait(self, mark: int) -> None:
        with torch.inference_mode():
            while self.done < mark:
                self.done += 1
                self._queue.popleft()()

    def finish(self) -> None:
        self.wait(self.given)

    def record(self, compute: Compute, undo: Compute) -> Compute:
        return lambda: self._queue.append(compute)

    def upload(self, values: Integers, target: Tensor) -> None:
        self._queue.append(partial(_copy, target, torch.from_numpy(values.flatten())))

    def download(self, source: Tensor) -> Download:
        memory = torch.full_like(source, -7)
        self._queue.append(partial(_copy, memory, source))
        mark = self.given

        def integers() -> list[list[int]]:
            self.wait(mark)
            return list(memory.tolist())

        return integers


class LateDecoder(GraphDecoder):
    """A graph decoder on a late device."""

    def __init__(self, late: LateDevice, gpt: GPT, cache: KVCache, **options: Any) -> None:
        forward = TorchForward(gpt, cache)
        super().__init__(gpt, cache, stream=late, forward_of=lambda rows: forward, **options)
        self.late, copy_prefix = late, cache.copy_prefix

        def copy(source: int, target: int, length: int) -> None:
            late.finish()
            copy_prefix(source, target, length)

        cache.copy_prefix = copy  # type: ignore[method-assign]

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        self.late.finish()
        return super().prefill(pieces)

    def _prefill_rows(self, given: Sequence[tuple[int, ...]]) -> Tensor:
        super()._prefill_rows(given)
        self.late.finish()  # the caller uses the results at once
        return self._hidden[: len(given)].clone()

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        logits = super().decode(token_ids, slots, positions)
        self.late.finish()  # likewise used at once
        return logits


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
