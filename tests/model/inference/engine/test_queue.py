"""WaitingQueue: callers take turns, each caller's requests are served in order of arrival, and no
request starves.

The queue is compared with a plain list and with counts. The tests also check that the scheduler's
prompts take turns.
"""

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.queue import WaitingQueue
from logitd.model.inference.engine.scheduler import Scheduler
from logitd.model.inference.engine.sequence import Group, Sequence, State
from tests.model.inference.engine.harness import generation

CALLERS = "abcd"


def waiting(name: str, caller: str = "", priority: int = 0, *, length: int = 1) -> Sequence:
    request = generation(name, [1] * length, caller=caller, priority=priority)
    return Sequence(Group(request), 0, 0.0)


def take_all(queue: WaitingQueue) -> list[Sequence]:
    taken = []
    while (first := next(iter(queue.firsts()), None)) is not None:
        queue.take(first)
        taken.append(first)
    assert len(queue) == 0
    assert list(queue) == []
    return taken


@given(st.lists(st.integers(-2, 2), max_size=40))
def test_queue_serves_one_caller_by_priority_and_arrival(priorities: list[int]) -> None:
    queue = WaitingQueue()
    sequences = [waiting(str(i), priority=priority) for i, priority in enumerate(priorities)]
    for sequence in sequences:
        queue.push(sequence)
    assert len(queue) == len(sequences)
    assert take_all(queue) == sorted(
        sequences, key=lambda s: s.request.priority
    )  # sorting is stable


@given(st.lists(st.tuples(st.sampled_from(CALLERS), st.booleans()), max_size=60))
def test_caller_waits_for_one_sequence_of_each_other_caller(acts: list[tuple[str, bool]]) -> None:
    """Arrivals and admissions come in any order."""
    queue, count = WaitingQueue(), itertools.count()
    lines: dict[str, list[Sequence]] = {caller: [] for caller in CALLERS}
    passed: dict[str, Counter[str]] = {caller: Counter() for caller in CALLERS}
    for caller, admits in acts + [("", True)] * len(acts):
        if not admits:
            sequence = waiting(str(next(count)), caller)
            lines[caller].append(sequence)
            queue.push(sequence)
        elif (first := next(iter(queue.firsts()), None)) is not None:
            name = first.request.caller
            assert lines[name].pop(0) is first, (
                "requests of a caller are served in order of arrival"
            )
            queue.take(first)
            passed[name].clear()
            for other in CALLERS:
                if other != name and lines[other]:
                    passed[other][name] += 1
                    assert passed[other][name] == 1, f"{name} was served twice before {other}"
        assert len(queue) == sum(map(len, lines.values()))
    assert len(queue) == 0


def test_priority_comes_before_turns() -> None:
    queue = WaitingQueue()
    sequences = [
        waiting("late", "a", 1), waiting("1", "a"), waiting("2", "a"), waiting("other", "b"),
        waiting("first", "a", -1),
    ]  # fmt: skip
    for sequence in sequences:
        queue.push(sequence)
    order = [sequence.request_id for sequence in take_all(queue)]
    assert order == ["first", "1", "other", "2", "late"]


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_queue_alternates_returning_and_new_callers(admitted_before: list[bool]) -> None:
    queue = WaitingQueue()
    sequences = [waiting(str(i), "a") for i in range(len(admitted_before))]
    for sequence, before in zip(sequences, admitted_before, strict=True):
        sequence.admitted = 1.0 if before else None
        queue.push(sequence)
    new = [s for s in sequences if s.admitted is None]
    back = [s for s in sequences if s.admitted is not None]
    both = list(itertools.chain.from_iterable(zip(back, new, strict=False)))
    rest = [*back[len(new) :], *new[len(back) :]]
    assert take_all(queue) == both + rest


def test_held_sequences_come_next_after_release() -> None:
    queue = WaitingQueue()
    for name, caller, held in (("1", "a", True), ("2", "b", False), ("3", "a", False)):
        queue.push(waiting(name, caller), held=held)
    assert [s.request_id for s in queue] == ["3", "1", "2"]
    assert [s.request_id for s in queue.firsts()] == ["3", "2"]
    queue.remove(next(s for s in queue if s.request_id == "3"))
    assert [s.request_id for s in queue.firsts()] == ["2"]
    queue.release()
    assert [s.request_id for s in queue.firsts()] == ["1", "2"]


def test_computed_prompts_take_turns() -> None:
    """All slots hold long prompts of one caller. When one of them ends, a prompt of another caller
    takes its slot. From then on, the prompts of the two callers are computed in turn."""
    scheduler = Scheduler(EngineConfig(slots=7, prefill_chunk=32))
    long = [waiting(f"long {i}", "long", length=96) for i in range(12)]
    for sequence in long:
        scheduler.enqueue(sequence)
    order: list[str] = []

    def step(now: float) -> None:
        for chunk in scheduler.plan(now).prefill:
            scheduler.prefilled(chunk, now)
            if chunk.completes_prompt:
                order.append(chunk.sequence.request_id)
                scheduler.remove(chunk.sequence)

    step(0.0)
    short = [waiting(f"short {i}", "short", length=32) for i in range(3)]
    for sequence in short:
        scheduler.enqueue(sequence)
    for now in range(1, 100):
        step(float(now))
    assert all(sequence.state is State.FINISHED for sequence in (*long, *short))
    assert order[:8] == [
        "long 0", "long 1", "long 2", "short 0", "long 3", "short 1", "long 4", "short 2",
    ]  # fmt: skip
    assert order[8:] == [f"long {i}" for i in range(5, 12)]
