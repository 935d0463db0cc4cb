"""CPU contention: fewer threads for torch's operations while other processes hold the cores.

Torch's threads meet after every operation. If one has lost its core to another process, all wait
for it, a scheduler slice at a time: next to a process that spun on one of two cores, a prompt took
6 to 12 times as long. One thread takes twice as long and waits for no other. `ContentionMonitor`
measures how much of its time the calling thread was off its core. If that share is large, the
thread computes alone for a while and then tries again; the pause doubles while it does not help.

The timing of these changes is random, so they must not change a bit. On the machines examined,
torch divides products over threads by output. If it does not, for the products of a model and a
number of rows, the threads are left alone. The native decoder's threads do the same by themselves
(cpu/native/pool.h).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.device import one_thread
from logitd.model.transformer.gpt import GPT, Block

LOST = 0.4
"""Share of its time off its core that makes a thread late. Without contention it is at most 0.1."""
LATE = 0.002
"""Seconds off its core that never make a thread late: the system's own interruptions."""
SHORTEST, LONGEST = 0.1, 1.6
"""Seconds alone: the first time, and the most when it does not help."""


class ContentionMonitor:
    """Contention for the cores, as seen by the thread that drives a model's prefill."""

    def __init__(
        self,
        gpt: GPT,
        clock: Callable[[], float] = time.perf_counter,
        on_core: Callable[[], float] = time.thread_time,
        *,
        keep_bits: Callable[[GPT, int], bool] | None = None,
    ) -> None:
        """`keep_bits` replaces `threads_keep_bits` for operations other than those of prefill."""
        self._gpt = gpt
        self._keep_bits = keep_bits
        self._clock = clock
        self._on_core = on_core
        self._alone_until = -1.0
        self._alone_for = SHORTEST
        self._keeps_bits: dict[int, bool] = {}

    @contextmanager
    def watched(self, rows: int, contended: bool = False) -> Iterator[None]:
        """Run torch operations on `rows` positions with all threads, or with one during contention.
        `contended` says that the caller knows of contention."""
        began = self._clock()
        if torch.get_num_threads() == 1 or self._gpt.token_embedding.weight.device.type != "cpu":
            yield
        elif (contended or began < self._alone_until) and self._may_change(rows):
            with one_thread():
                yield
        else:
            worked = self._on_core()
            yield
            now = self._clock()
            lost = (now - began) - (self._on_core() - worked)
            if lost > max(LATE, LOST * (now - began)):
                self._stay_alone(began, now)

    def _stay_alone(self, began: float, now: float) -> None:
        again = began - self._alone_until < self._alone_for
        self._alone_for = min(2 * self._alone_for, LONGEST) if again else SHORTEST
        self._alone_until = now + self._alone_for

    def _may_change(self, rows: int) -> bool:
        if rows not in self._keeps_bits:
            keep_bits = self._keep_bits or threads_keep_bits
            self._keeps_bits[rows] = keep_bits(self._gpt, rows)
        return self._keeps_bits[rows]


def threads_keep_bits(gpt: GPT, rows: int) -> bool:
    """True if the matrix products of a block with this many rows have the same bits with one thread
    as with all of torch's."""
    block = gpt.blocks[0]
    assert isinstance(block, Block)
    generator = torch.Generator().manual_seed(0)
    for linear in (block.qkv, block.attention_out, block.mlp_up, block.mlp_down):
        x = torch.randn(1, rows, linear.in_features, generator=generator).to(linear.weight.dtype)
        if not one_thread_keeps_bits(partial(F.linear, x, linear.weight, linear.bias)):
            return False
    return True


def one_thread_keeps_bits(compute: Callable[[], Tensor]) -> bool:
    """True if a computation has the same bits with one thread as with all of torch's."""
    together = compute()
    with one_thread():
        return torch.equal(together, compute())
