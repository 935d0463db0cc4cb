"""CPU contention: fewer threads for torch's operations while other processes hold the cores.

Torch's threads meet after every operation. When one has lost its core to another process, all wait
for it, a slice of the scheduler's at a time: measured, a prompt took 6 to 12 times as long beside a
process that spun on one of two cores. One thread takes twice as long and waits for no other. So
`ContentionMonitor` watches how much of its time the calling thread was off its core. Where that is
a large share, the thread computes alone for a while, then tries again; for longer each time that it
did not help.

When threads are changed is a matter of timing, so it must not change a bit. Torch divides products
over threads by output on the machines where this was looked at; where it does not, for the products
of a model and a number of rows, threads are left as they are. The native decoder's threads are not
torch's and do the same by themselves (cpu/native/pool.h).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from logitd.model.device import one_thread
from logitd.model.transformer.gpt import GPT, Block

LOST = 0.4
"""Share of its time off its core from which a thread is late. Without contention it is 0.1 or
less."""
LATE = 0.002
"""Seconds off its core below which it is not late: the system's own interruptions."""
SHORTEST, LONGEST = 0.1, 1.6
"""Seconds alone, the first time and when it did not help."""


class ContentionMonitor:
    """How contended the cores are, seen from the thread that drives a model's prefill."""

    def __init__(
        self,
        gpt: GPT,
        clock: Callable[[], float] = time.perf_counter,
        on_core: Callable[[], float] = time.thread_time,
        *,
        keep_bits: Callable[[GPT, int], bool] | None = None,
    ) -> None:
        """`keep_bits` says of the operations that are watched what `threads_keep_bits` says of
        those of prefill, for so many rows."""
        self._gpt = gpt
        self._keep_bits = keep_bits
        self._clock = clock
        self._on_core = on_core
        self._alone_until = -1.0
        self._alone_for = SHORTEST
        self._keeps_bits: dict[int, bool] = {}

    @contextmanager
    def watched(self, rows: int, contended: bool = False) -> Iterator[None]:
        """Around torch operations on `rows` positions: with all threads, or alone for now; also
        alone where the caller knows that the cores are `contended`."""
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
    """Whether the matrix products of a block, with that many rows, give the same bits with one
    thread as with all of torch's."""
    block = gpt.blocks[0]
    assert isinstance(block, Block)
    generator = torch.Generator().manual_seed(0)
    for linear in (block.qkv, block.attention_out, block.mlp_up, block.mlp_down):
        x = torch.randn(1, rows, linear.in_features, generator=generator).to(linear.weight.dtype)
        together = F.linear(x, linear.weight, linear.bias)
        with one_thread():
            alone = F.linear(x, linear.weight, linear.bias)
        if not torch.equal(together, alone):
            return False
    return True
