"""CPU contention: runs torch's operations on one thread while other processes use the cores.

Torch's threads synchronize after every operation. If one of them has lost its core to another
process, all others wait for it, for a time slice of the system's scheduler. When another process
kept one of two cores busy, a prompt took 6 to 12 times as long on two threads, but only twice as
long on one. `ContentionMonitor` measures the share of time in which the calling thread was off its
core. If the share is large, the thread computes alone for a while and then tries all threads again.
If that fails, it computes alone for twice as long.

These switches happen at random times, so they must not change any bits. On the machines examined,
each of torch's threads computes different outputs of a product, so the number of threads does not
change the bits. If the number of threads does change the bits of a model's products for some number
of rows, all threads are always used for that number of rows. The native decoder's threads implement
the same rule themselves (cpu/native/pool.h).
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
"""Share of time off its core above which a thread counts as late. Without contention it is at most
0.1."""
LATE = 0.002
"""A thread that was off its core for at most this many seconds never counts as late. This tolerates
interruptions by the system."""
SHORTEST, LONGEST = 0.1, 1.6
"""Initial and maximum time, in seconds, for which a thread computes alone. The time doubles
whenever another attempt to use all threads fails."""


class ContentionMonitor:
    """Detects whether the thread that computes a model's prompts shares its core with other
    threads."""

    def __init__(
        self,
        gpt: GPT,
        clock: Callable[[], float] = time.perf_counter,
        on_core: Callable[[], float] = time.thread_time,
        *,
        keep_bits: Callable[[GPT, int], bool] | None = None,
    ) -> None:
        """`keep_bits` replaces `threads_keep_bits` if operations other than prefill are watched."""
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
        `contended` is true if the caller already knows of contention."""
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
    """True if the matrix products of a block on this number of rows have the same bits on one
    thread as on all of torch's threads."""
    block = gpt.blocks[0]
    assert isinstance(block, Block)
    generator = torch.Generator().manual_seed(0)
    for linear in (block.qkv, block.attention_out, block.mlp_up, block.mlp_down):
        x = torch.randn(1, rows, linear.in_features, generator=generator).to(linear.weight.dtype)
        if not one_thread_keeps_bits(partial(F.linear, x, linear.weight, linear.bias)):
            return False
    return True


def one_thread_keeps_bits(compute: Callable[[], Tensor]) -> bool:
    """True if a computation has the same bits on one thread as on all of torch's threads."""
    together = compute()
    with one_thread():
        return torch.equal(together, compute())
