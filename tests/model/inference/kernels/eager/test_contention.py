"""Contention: when another process is busy on the same cores, fewer threads are used for a while,
and no bit changes."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from logitd.model.device import use_threads
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kernels.eager import contention as crowding_module
from logitd.model.inference.kernels.eager.contention import (
    LONGEST,
    SHORTEST,
    ContentionMonitor,
    threads_keep_bits,
)
from logitd.model.inference.kv_cache import KVCache
from tests.model.factories import tiny_config, tiny_gpt

GPT = tiny_gpt()


class Machine:
    """A clock that a test advances, and the time that a thread has spent on its core, both in
    seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.on_core = 0.0

    def spend(self, seconds: float, lost: float = 0.0) -> None:
        self.now += seconds
        self.on_core += seconds * (1 - lost)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    use_threads(2)
    yield
    use_threads(before)


def watching(machine: Machine) -> ContentionMonitor:
    return ContentionMonitor(GPT, clock=lambda: machine.now, on_core=lambda: machine.on_core)


def threads_of(
    monitor: ContentionMonitor, machine: Machine, lost: float, contended: bool = False
) -> int:
    """Number of threads used during a 50 ms operation in which the calling thread is off its core
    for the share `lost` of the time."""
    with monitor.watched(32, contended):
        machine.spend(0.05, lost)
        return torch.get_num_threads()


def test_late_thread_computes_alone_for_a_while() -> None:
    machine = Machine()
    monitor = watching(machine)
    assert threads_of(monitor, machine, lost=0.1) == 2
    assert threads_of(monitor, machine, lost=0.6) == 2, "lateness is known afterwards"
    alone_since = machine.now
    while threads_of(monitor, machine, lost=0.0) == 1:
        assert torch.get_num_threads() == 2, "all threads compute again afterwards"
    assert SHORTEST <= machine.now - alone_since < SHORTEST + 0.11
    assert threads_of(monitor, machine, lost=0.1) == 2, "it helped"


def test_contention_doubles_the_pause_while_it_lasts() -> None:
    machine = Machine()
    monitor = watching(machine)
    waits = []
    for _ in range(8):
        assert threads_of(monitor, machine, lost=0.6) == 2
        since = machine.now
        while machine.now < monitor._alone_until:
            assert threads_of(monitor, machine, lost=0.0) == 1
        waits.append(round((machine.now - since) / SHORTEST))
    assert waits == [1, 2, 4, 8, 16, 16, 16, 16]
    assert LONGEST == 16 * SHORTEST
    machine.spend(2 * LONGEST)
    threads_of(monitor, machine, lost=0.6)
    assert monitor._alone_until - machine.now == pytest.approx(SHORTEST), "the pause starts over"


def test_decoder_can_report_contention() -> None:
    machine = Machine()
    assert threads_of(watching(machine), machine, lost=0.0, contended=True) == 1


def test_short_interruptions_are_ignored() -> None:
    machine = Machine()
    monitor = watching(machine)
    with monitor.watched(32):
        machine.spend(0.0015, lost=0.9)
    assert threads_of(monitor, machine, lost=0.0) == 2


def test_threads_that_change_bits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def divides_differently(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> object:
        return torch.nn.functional.linear(x, weight, bias) + torch.get_num_threads()

    class Functional:
        linear = staticmethod(divides_differently)

    monkeypatch.setattr(crowding_module, "F", Functional)
    assert not threads_keep_bits(GPT, 32)
    machine = Machine()
    assert threads_of(watching(machine), machine, lost=0.0, contended=True) == 2


@contextmanager
def neighbors(core: int, count: int) -> Iterator[None]:
    """Run `count` processes on one core, each in an endless loop."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        for process in spinning:
            os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def threads_of_this_process() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="binds a thread to a core, for Linux only")
def test_native_threads_notice_contention_and_keep_the_bits(library: ctypes.CDLL) -> None:
    """A thread that shares its core with two other processes loses the core in the middle of its
    work. Every step has the same bits as with a single thread, whether or not the decoder has
    noticed the contention."""
    gpt = tiny_gpt(tiny_config(head_dim=16, d_model=512, d_ff=4096, n_layer=4))

    def decoder(threads: int) -> NativeDecoder:
        cache = KVCache(gpt.config, 8, device=torch.device("cpu"), dtype=torch.float32)
        return NativeDecoder(library, gpt, cache, threads=threads)

    slots = list(range(8))
    steps = [(slots, slots, [position] * 8) for position in range(16)]
    one, before = decoder(1), threads_of_this_process()
    expected = [one.decode(*step).clone() for step in steps]
    two = decoder(2)
    (worker,) = threads_of_this_process() - before
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(worker, {core})
    until, seen = time.monotonic() + 60, set[bool]()
    with neighbors(core, 2):
        while seen != {False, True} and time.monotonic() < until:
            for step, logits in zip(steps, expected, strict=True):
                assert torch.equal(two.decode(*step), logits)
                seen.add(two.contended)
    assert seen == {False, True}
    assert not one.contended
    one.close()
    two.close()


def alone_until(library: ctypes.CDLL, waits: list[tuple[float, float]]) -> float:
    """The time until which the native pool uses a single thread, after it has waited for its other
    threads as `waits` lists; 0 if it always uses all threads. Each wait is a pair (start, length).
    All times are in milliseconds."""
    library.logitd_contention_alone_until.restype = ctypes.c_int64
    since = [round(1000 * start) for start, _ in waits]
    until = [round(1000 * (start + length)) for start, length in waits]
    numbers = ctypes.c_int64 * len(waits)
    found: int = library.logitd_contention_alone_until(numbers(*since), numbers(*until), len(waits))
    return found / 1000


def test_busy_event_loop_is_no_contention(library: ctypes.CDLL) -> None:
    """With 32 streams, a server spends one or two milliseconds of processor time to deliver the
    tokens of a step. That once made the decoder use a single thread, at three quarters of its
    rate."""
    assert alone_until(library, [(1000 + 12 * step, 1.5) for step in range(100)]) == 0
    assert alone_until(library, [(1000 + 45 * step, 2.5) for step in range(100)]) == 0
    assert alone_until(library, [(1000 + step, 0.4) for step in range(100)]) == 0


def test_contention_shows_in_one_slice_or_two_short_ones(library: ctypes.CDLL) -> None:
    assert alone_until(library, [(1000, 8)]) == 1028
    assert alone_until(library, [(1000, 1.5), (1004, 1.5)]) == 1025.5


def test_lasting_contention_doubles_the_native_pause(library: ctypes.CDLL) -> None:
    waits, ends = [(1000.0, 8.0)], []
    for _ in range(7):
        ends.append(alone_until(library, waits))
        waits.append((ends[-1] + 1, 8.0))
    pauses = [end - sum(wait) for end, wait in zip(ends, waits, strict=False)]
    assert pauses == [20, 40, 80, 160, 320, 640, 640]
