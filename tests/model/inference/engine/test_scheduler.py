"""Scheduler: fair, bounded, and always right about the contents of a cache row.

The plans are carried out on a simulated cache: instead of tensors, each cell stores the tokens that
it was computed from. So an overwritten row, a skipped position or a prefix that was never in the
cache is noticed in the first step that would use it.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from logitd.model.inference.attribution.task import AttributionTask
from logitd.model.inference.engine.callers import COMPANY_SECONDS
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.cost import StepCost
from logitd.model.inference.engine.requests import AttributionRequest, Request
from logitd.model.inference.engine.scheduler import (
    COOLDOWN,
    LARGE,
    STEP_ELEMENTS,
    PrefillChunk,
    Scheduler,
    StepPlan,
)
from logitd.model.inference.engine.sequence import CHUNKS_IN_FLIGHT, Group, Sequence, State
from logitd.model.inference.interventions import Intervention
from logitd.model.transformer.config import BLOCK
from tests.model.inference.engine.harness import check_scheduler, generation, outputs_request

CHUNK = 64
OUTPUT_ELEMENTS = 32


@dataclass(frozen=True)
class Cell:
    """The contents of one cache position: the keys and values of the last of `tokens`, which
    follows all the others."""

    tokens: tuple[int, ...]
    prefilled: bool
    step: float  # when it was computed; a copy keeps it


class Simulation:
    """A scheduler, and the cache that its plans write."""

    def __init__(
        self,
        slots: int,
        *,
        prefill_chunk: int = CHUNK,
        prefix_reuse: bool = True,
        share_decoded: bool = False,
    ) -> None:
        self.scheduler = Scheduler(
            EngineConfig(slots=slots, prefill_chunk=prefill_chunk, prefix_reuse=prefix_reuse),
            share_decoded=share_decoded,
        )
        self.share_decoded = share_decoded
        self.scheduler.step_elements = OUTPUT_ELEMENTS
        self.cells: list[dict[int, Cell]] = [{} for _ in range(slots)]
        self.admitted: list[Sequence] = []
        self.rows: dict[Sequence, list[int]] = {}  # positions handed out
        self.now = 0.0

    def add(self, request: Request, n: int = 1) -> list[Sequence]:
        group = Group(request, cost=StepCost(output=1))
        sequences = [Sequence(group, index, self.now) for index in range(n)]
        for sequence in sequences:
            self.scheduler.enqueue(sequence)
        return sequences

    def step(self) -> StepPlan:
        """Plan, check the plan, and carry it out as the engine and the runner do."""
        self.now += 1
        decoding = [s for s in self.scheduler.running if s.state is State.DECODE]
        before, has_work = list(self.scheduler.running), self.scheduler.has_work()
        room = self.scheduler.slots.total - self.scheduler.slots.used
        plan = self.scheduler.plan(self.now)
        assert bool(plan) == has_work
        self.check_evictions(plan, before, room)
        for sequence in plan.given_up:
            self.scheduler.remove(sequence)
        assert list(plan.decode) == decoding, "a running sequence was left out"
        self.admitted += [s for s in self.scheduler.running if s.admitted == self.now]
        self.check_shares(plan)
        for chunk in plan.prefill:
            self.prefill(chunk)
        for sequence in plan.decode:
            self.decode(sequence)
        for chunk in plan.prefill:
            self.scheduler.prefilled(chunk, self.now)
            if chunk.sequence.outputs is not None:
                self.hand_out(chunk)
            elif chunk.completes_prompt:
                self.append(chunk.sequence)
        for sequence in plan.decode:
            sequence.computed += 1
            self.append(sequence)
        check_scheduler(self.scheduler)
        return plan

    def check_evictions(self, plan: StepPlan, before: list[Sequence], room: int) -> None:
        """Check that only waiting requests take slots, and only from readers that are behind."""
        evicted = [s for s in before if s not in self.scheduler.running]
        assert len(evicted) == plan.evicted
        admitted = [s for s in self.scheduler.running if s not in before]
        assert not evicted or len(admitted) == room + len(evicted)
        for sequence in evicted:
            assert sequence.state is State.PAUSED
            assert sequence.credit <= 0

    def check_shares(self, plan: StepPlan) -> None:
        """Check that requests are served in order of arrival, within the budget, and in whole
        blocks."""
        assert len({chunk.sequence for chunk in plan.prefill}) == len(plan.prefill)
        spent = sum(-(-(chunk.end - chunk.start) // BLOCK) * BLOCK for chunk in plan.prefill)
        assert spent <= self.scheduler.config.prefill_chunk
        for chunk in plan.prefill:
            assert chunk.start % BLOCK == 0
            assert chunk.start < chunk.end
            assert chunk.end % BLOCK == 0 or chunk.completes_prompt
        rows = sum(map(rows_in, plan.prefill))
        assert rows <= OUTPUT_ELEMENTS
        # Served requests are the earliest of those that can compute. Serving stops only when the
        # budget is spent, and passes over a request only for the rows' separate budget.
        able = [s for s in self.scheduler.running if s.state is State.PREFILL and s.may_compute]
        served = [chunk.sequence for chunk in plan.prefill]
        assert served == [s for s in able if s in served]
        if spent < self.scheduler.config.prefill_chunk:
            passed_over = [s for s in able if s not in served]
            assert not passed_over or rows
            assert all(s.outputs is not None for s in passed_over)
        for chunk in plan.prefill[:-1]:
            whole = chunk.completes_prompt or chunk.sequence.outputs is not None
            assert whole, "a later prompt was served while an earlier one could have continued"

    def prefill(self, chunk: PrefillChunk) -> None:
        sequence = chunk.sequence
        assert sequence.slot is not None
        cells = self.cells[sequence.slot]
        if chunk.start == 0 or chunk.copy_from is not None:  # the first chunk in this slot
            assert chunk.start == self.best_prefix(sequence)
            assert sequence.cached == chunk.start or sequence in self.rows
            if chunk.copy_from is not None:
                source = self.cells[chunk.copy_from]
                cells.update({p: source[p] for p in range(chunk.start)})
            for position in [p for p in cells if p >= chunk.start]:
                del cells[position]
        self.check_cells(sequence, chunk.start)
        padded_end = -(-chunk.end // BLOCK) * BLOCK
        for position in range(chunk.start, padded_end):
            real = position < chunk.end
            tokens = tuple(sequence.tokens[: position + 1]) if real else ()
            cells[position] = Cell(tokens, real, self.now)

    def decode(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        assert sequence.computed == len(sequence.tokens) - 1
        self.check_cells(sequence, sequence.computed)
        self.cells[sequence.slot][sequence.computed] = Cell(tuple(sequence.tokens), False, self.now)

    def check_cells(self, sequence: Sequence, end: int) -> None:
        """Check that positions [0, end) of a sequence's row were computed from its own tokens."""
        assert sequence.slot is not None
        cells = self.cells[sequence.slot]
        for position in range(end):
            assert cells[position].tokens == tuple(sequence.tokens[: position + 1])
            if position < sequence.prompt_length:
                assert cells[position].prefilled or self.share_decoded

    def best_prefix(self, sequence: Sequence) -> int:
        """Length of the longest prefix in whole blocks that any row held before this step, up to
        the first needed position. Decoded blocks count only once their sequence has ended."""
        if not self.scheduler.config.prefix_reuse:
            return 0
        decoding = {
            s.slot: s.prompt_length for s in self.scheduler.running if s.state is State.DECODE
        }

        def shared(slot: int, position: int) -> bool:
            cell = self.cells[slot].get(position)
            ended = slot not in decoding or position < decoding[slot]
            return (
                cell is not None
                and (cell.prefilled or (self.share_decoded and ended))
                and cell.step < self.now
                and cell.tokens == tuple(sequence.tokens[: position + 1])
            )

        return max(
            end
            for slot in range(len(self.cells))
            for end in range(0, sequence.first_needed + 1, BLOCK)
            if all(shared(slot, position) for position in range(end))
        )

    def hand_out(self, chunk: PrefillChunk) -> None:
        if count := rows_in(chunk):
            sequence = chunk.sequence
            assert sequence.outputs is not None
            asked = sequence.outputs.positions[sequence.handed_out :][:count]
            assert all(chunk.start <= position < chunk.end for position in asked)
            self.rows.setdefault(sequence, []).extend(asked)
            self.scheduler.charge(sequence, count, self.now)
        if chunk.completes_prompt:
            self.scheduler.remove(chunk.sequence)

    def append(self, sequence: Sequence) -> None:
        assert sequence.generation is not None
        sequence.tokens.append(1000 + len(sequence.tokens))
        if not sequence.tokens_left:
            self.scheduler.remove(sequence)

    def drain(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("it never ends")


def rows_in(chunk: PrefillChunk) -> int:
    """Number of rows that a chunk returns. Rows that were returned before do not count."""
    request, handed_out = chunk.sequence.outputs, chunk.sequence.handed_out
    if request is None:
        return 0
    return sum(chunk.start <= p < chunk.end for p in request.positions[handed_out:])


def blocks(*tokens: int, rest: int = 0) -> list[int]:
    """One block for each of the `tokens`, filled with that token, and then `rest` zeros."""
    return list(itertools.chain.from_iterable([token] * BLOCK for token in tokens)) + [0] * rest


def states(sequences: Iterable[Sequence]) -> list[State]:
    return [sequence.state for sequence in sequences]


@pytest.mark.parametrize(("max_tokens", "cached"), [(24, 32), (25, 64), (55, 64), (56, 64)])
def test_decoded_blocks_are_shared_without_the_last_token(max_tokens: int, cached: int) -> None:
    """The last token was sampled but never computed. If it completes a block, that block lacks the
    keys and values of its last position."""
    simulation = Simulation(slots=2, share_decoded=True)
    (first,) = simulation.add(generation("a", blocks(1, rest=8), max_tokens=max_tokens))
    simulation.drain()
    (second,) = simulation.add(generation("b", [*first.tokens, 5]))
    simulation.drain()
    assert len(first.tokens) == 40 + max_tokens
    assert second.cached == cached


def test_siblings_wait_for_the_leader_and_copy() -> None:
    simulation = Simulation(slots=8)
    prompt = blocks(1, 2, 3, 4, rest=10)
    sequences = simulation.add(generation("a", prompt, n=5, max_tokens=3), n=5)
    (behind,) = simulation.add(generation("b", [9]))
    computed = []
    while simulation.scheduler.has_work():
        plan = simulation.step()
        computed += [
            (c.sequence.index, c.start, c.end) for c in plan.prefill if c.sequence is not behind
        ]
    assert computed == [(0, 0, 64), (0, 64, 128), (0, 128, 138)] + [
        (index, 128, 138) for index in range(1, 5)
    ]
    # After two steps all four blocks are in the cache: no request has to wait any more.
    assert [s.admitted for s in sequences] == [1.0, 3.0, 3.0, 3.0, 3.0]
    assert behind.admitted == 3.0


@pytest.mark.parametrize("width", [LARGE, LARGE // BLOCK])
def test_large_outputs_cool_down_while_others_decode(width: int) -> None:
    scheduler = Scheduler(EngineConfig(slots=2, prefill_chunk=CHUNK))
    decoding = Sequence(Group(generation("decoding", [1], max_tokens=99)), 0, 0.0)
    request = outputs_request("rows", [2] * 200, range(200))
    rows = Sequence(Group(request, cost=StepCost(output=width)), 0, 0.0)
    rows.credit = 100
    for sequence in (decoding, rows):
        scheduler.enqueue(sequence)
    plan = scheduler.plan(10.0)  # the rows' first block, then COOLDOWN times 3 s without them
    assert [chunk.end for chunk in plan.prefill] == [1, 32]
    for chunk in plan.prefill:
        scheduler.prefilled(chunk, 13.0)
    scheduler.stepped(plan, 13.0)
    assert COOLDOWN == 2
    assert [scheduler.plan(now).prefill for now in (13.0, 16.0, 18.9)] == [(), (), ()]
    plan = scheduler.plan(19.0)
    (second,) = plan.prefill
    assert second.start == 32
    scheduler.prefilled(second, 20.0)
    scheduler.stepped(plan, 20.0)
    scheduler.remove(decoding)
    (third,) = scheduler.plan(20.0).prefill  # without decoding there is no cooldown
    assert third.start == second.end


def test_tapped_steps_cool_down_while_others_decode() -> None:
    """Twenty requests with interventions once made the tokens of other requests take eight times as
    long, because each step computed all of their prompts and rows. A step now computes one of these
    prompts, and then the other requests decode for twice as long as that step took."""
    scheduler = Scheduler(EngineConfig(slots=5, prefill_chunk=256))
    change = (Intervention(stage="embedding", operation="zero"),)
    decoding = Sequence(Group(generation("decoding", [1], max_tokens=99)), 0, 0.0)
    request = replace(generation("a", [2] * 5, max_tokens=99), interventions=change)
    tapped = [
        Sequence(Group(replace(request, request_id=name)), 0, 0.0) for name in ("a", "b", "c")
    ]
    for sequence in (decoding, *tapped):
        scheduler.enqueue(sequence)

    def step(now: float, took: float) -> tuple[list[Sequence], list[Sequence]]:
        plan = scheduler.plan(now)
        for chunk in plan.prefill:
            scheduler.prefilled(chunk, now + took)
        scheduler.stepped(plan, now + took)
        return [chunk.sequence for chunk in plan.prefill], list(plan.decode)

    assert step(0.0, 1.0) == ([decoding, *tapped], []), "no sequence decodes yet"
    assert step(1.0, 0.1) == ([], [decoding]), "a cooldown of 2 s"
    d, e = (Sequence(Group(replace(request, request_id=name)), 0, 0.0) for name in ("d", "e"))
    for sequence in tapped:
        scheduler.remove(sequence)
    for sequence in (d, e):
        scheduler.enqueue(sequence)
    assert step(2.0, 0.1) == ([], [decoding])
    assert step(3.0, 1.0) == ([d], [decoding]), "one tapped prompt, not both"
    assert step(4.0, 0.1) == ([], [decoding])
    assert step(6.0, 1.0) == ([e], [decoding, d]), "tapped rows wait as well"
    assert step(7.0, 0.1) == ([], [decoding])
    scheduler.remove(decoding)
    assert step(7.1, 1.0) == ([], [d, e]), "no reason to rest"


def changed(name: str, cost: StepCost, length: int = 100, caller: str = "") -> Sequence:
    """A sequence whose interventions have this cost."""
    zero = (Intervention(stage="embedding", operation="zero"),)
    request = generation(name, [2] * length, max_tokens=99, interventions=zero, caller=caller)
    return Sequence(Group(request, cost=cost), 0, 0.0)


def test_step_has_one_costly_block_and_plain_prompts() -> None:
    scheduler = Scheduler(EngineConfig(slots=4, prefill_chunk=256))
    costly = StepCost(position=STEP_ELEMENTS)
    plain = Sequence(Group(generation("plain", [1] * 50, max_tokens=99)), 0, 0.0)
    for sequence in (changed("a", costly), changed("b", costly), plain):
        scheduler.enqueue(sequence)
    plan = scheduler.plan(0.0)
    spans = [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in plan.prefill]
    assert spans == [("a", 0, 32), ("plain", 0, 50)]


@pytest.mark.parametrize(("row", "at_once"), [(2 * STEP_ELEMENTS, 1), (STEP_ELEMENTS // 2, 2)])
def test_costly_changed_rows_decode_in_turn(row: int, at_once: int) -> None:
    scheduler = Scheduler(EngineConfig(slots=4, prefill_chunk=256))
    for name in "abcd":
        scheduler.enqueue(changed(name, StepCost(row=row), length=3, caller=name))
    for chunk in scheduler.plan(0.0).prefill:
        scheduler.prefilled(chunk, 0.0)
    plans = [scheduler.plan(1.0).decode for _ in range(8 // at_once)]
    assert [len(decode) for decode in plans] == [at_once] * len(plans)
    turns = Counter(sequence.request_id for decode in plans for sequence in decode)
    assert turns == dict.fromkeys("abcd", 2)


@pytest.mark.parametrize(("row", "held"), [(2 * STEP_ELEMENTS, 1), (STEP_ELEMENTS // 3, 3)])
def test_changed_rows_take_no_slots_to_wait_in(row: int, held: int) -> None:
    """One caller's 64 sequences with interventions once held all slots for a minute. Each step
    computed only one of their rows, while other callers waited for a slot."""
    scheduler = Scheduler(EngineConfig(slots=7))
    sequences = [changed(f"{number}", StepCost(row=row), caller="a") for number in range(7)]
    plain = Sequence(Group(generation("plain", [1], max_tokens=9, caller="b")), 0, 0.0)
    for sequence in (*sequences, plain):
        scheduler.enqueue(sequence)
    for now in (0.0, 1.0):
        scheduler.plan(now)
        assert scheduler.running == [sequences[0], plain, *sequences[1:held]]
    scheduler.remove(sequences[0])
    scheduler.plan(2.0)
    assert scheduler.running == [plain, *sequences[1 : held + 1]]


def test_caller_leaves_slots_while_another_caller_is_active() -> None:
    """One caller's long texts once held all slots, and another caller's next request waited until
    the first of these texts ended."""
    scheduler = Scheduler(EngineConfig(slots=16, prefill_chunk=32))

    def running_after(now: float, caller: str, n: int = 1) -> int:
        request = generation(f"{caller} at {now}", [1], n=n, max_tokens=9, caller=caller)
        for index in range(n):
            scheduler.enqueue(Sequence(Group(request), index, now))
        scheduler.plan(now)
        return len(scheduler.running)

    assert running_after(0.0, "a", n=20) == 16, "a caller alone may hold all"
    assert running_after(1.0, "b") == 16
    for sequence in scheduler.running[:3]:
        scheduler.remove(sequence)
    assert running_after(2.0, "a") == 15, "one of b, and 14 of a, of which more wait"
    assert running_after(3.0, "b") == 16
    for sequence in [s for s in scheduler.running if s.request.caller == "b"]:
        scheduler.remove(sequence)
    scheduler.plan(4.0)
    assert len(scheduler.running) == 14
    scheduler.plan(600.0)
    assert len(scheduler.running) == 14, "b gets a slot after a quiet while too"
    scheduler.plan(3.0 + COMPANY_SECONDS)
    assert len(scheduler.running) == 16


def test_attributions_get_half_of_the_time_next_to_heavy_prompts() -> None:
    """One piece of an attribution was once computed after each heavy step of prompts, so a short
    attribution waited half a minute."""
    scheduler = Scheduler(EngineConfig(slots=2, prefill_chunk=32))
    request = outputs_request("rows", [2] * 2000, range(2000))
    rows = Sequence(Group(request, cost=StepCost(output=LARGE)), 0, 0.0)
    rows.credit = 1000
    task = AttributionTask(position=0)
    why = AttributionRequest(request_id="why", token_ids=(1,), task=task)
    for sequence in (rows, Sequence(Group(why), 0, 0.0)):
        scheduler.enqueue(sequence)
    seconds = {"prompts": 0.0, "pieces": 0.0}
    now = 0.0
    for _ in range(60):
        plan = scheduler.plan(now)
        kind, took = ("prompts", 1.0) if plan.prefill else ("pieces", 0.1)
        assert bool(plan.prefill) != (plan.attribution is not None)
        for chunk in plan.prefill:
            scheduler.prefilled(chunk, now + took)
        now, seconds[kind] = now + took, seconds[kind] + took
        scheduler.stepped(plan, now)
    assert seconds["pieces"] == pytest.approx(seconds["prompts"], abs=1.0)


def test_callers_of_attributions_get_equal_times() -> None:
    """Callers once took turns after each piece, without regard to cost. So a short attribution had
    to wait for a long piece of another caller before each of its own pieces."""
    scheduler, task = Scheduler(EngineConfig(slots=2)), AttributionTask(position=0)
    for caller, count in (("slow", 2), ("fast", 1)):
        for index in range(count):
            name = f"{caller} {index}"
            why = AttributionRequest(request_id=name, token_ids=(1,), task=task, caller=caller)
            scheduler.enqueue(Sequence(Group(why), 0, 0.0))
        scheduler.plan(0.0)
    seconds, pieces, now = {"slow": 0.0, "fast": 0.0}, Counter[str](), 0.0
    for _ in range(200):
        plan = scheduler.plan(now)
        assert plan.attribution is not None
        caller = plan.attribution.request.caller
        pieces[plan.attribution.request_id] += 1
        took = 1.0 if caller == "slow" else 0.0625
        now, seconds[caller] = now + took, seconds[caller] + took
        scheduler.stepped(plan, now)
    assert abs(seconds["slow"] - seconds["fast"]) <= 1.0
    assert abs(pieces["slow 0"] - pieces["slow 1"]) <= 1


def test_small_outputs_have_no_cooldown() -> None:
    scheduler = Scheduler(EngineConfig(slots=2, prefill_chunk=32))
    decoding = Sequence(Group(generation("decoding", [1], max_tokens=99)), 0, 0.0)
    scheduler.enqueue(decoding)
    scheduler.prefilled(scheduler.plan(0.0).prefill[0], 1.0)
    request = outputs_request("rows", [2] * 64, range(64))
    rows = Sequence(Group(request, cost=StepCost(output=1)), 0, 0.0)
    scheduler.enqueue(rows)
    plan = scheduler.plan(1.0)
    scheduler.prefilled(plan.prefill[0], 9.0)
    scheduler.stepped(plan, 9.0)
    assert [chunk.start for chunk in scheduler.plan(9.0).prefill] == [32]


def behind(simulation: Simulation, *requests: Request) -> list[Sequence]:
    """Add requests for rows that no client reads, and compute them as far as possible."""
    sequences = [simulation.add(request)[0] for request in requests]
    while simulation.scheduler.has_work():
        simulation.step()
    assert all(sequence.credit == 0 for sequence in sequences)
    return sequences


def test_prefix_that_is_copied_after_an_eviction_is_not_counted_as_cached() -> None:
    simulation = Simulation(slots=2)
    first, _ = behind(
        simulation,
        outputs_request("first", [1] * 200, range(200)),
        outputs_request("second", [1] * 200, range(200)),
    )
    simulation.add(generation("waiting", [5], max_tokens=3))
    assert simulation.step().evicted == 1
    for _ in range(CHUNKS_IN_FLIGHT):
        simulation.scheduler.grant(first)
    simulation.drain()
    assert first.computed > first.cached == 0


def test_waiting_request_takes_the_slot_of_the_slowest_reader() -> None:
    simulation = Simulation(slots=2)
    first, second = behind(
        simulation,
        outputs_request("first", [1] * 200, range(200)),
        outputs_request("second", [2] * 200, range(200)),
    )
    assert states([first, second]) == [State.PREFILL] * 2, "no sequence waits: nothing changes"
    (waiting,) = simulation.add(generation("waiting", [5], max_tokens=3))
    assert simulation.step().evicted == 1
    assert states([waiting, first, second]) == [State.DECODE, State.PAUSED, State.PREFILL]
    simulation.drain()
    assert states([waiting, first]) == [State.FINISHED, State.PAUSED]
    simulation.scheduler.grant(first)  # a piece has not reached its reader yet
    assert not simulation.scheduler.has_work()
    simulation.scheduler.grant(first)
    simulation.drain()
    assert first.computed == 2 * CHUNKS_IN_FLIGHT * OUTPUT_ELEMENTS
    for _ in range(10):
        simulation.scheduler.grant(first)
        simulation.scheduler.grant(second)
    simulation.drain()
    assert states([first, second]) == [State.FINISHED] * 2
    assert simulation.rows == {first: list(range(200)), second: list(range(200))}
    assert first.admitted == 1.0, "as at its first admission"


def test_no_more_are_paused_than_there_are_slots() -> None:
    """The unread rows of paused sequences take memory. If more are paused than there are slots, the
    sequence whose reader has been behind longest is ended."""
    simulation = Simulation(slots=2)
    requests = [outputs_request(str(i), [i] * 200, range(200)) for i in range(6)]
    sequences = [simulation.add(request)[0] for request in requests]
    given_up: list[Sequence] = []
    while simulation.scheduler.has_work():
        given_up += simulation.step().given_up
        assert len(simulation.scheduler.paused) <= 2
    assert given_up == sequences[:2]
    assert states(sequences[2:]) == [State.PAUSED] * 2 + [State.PREFILL] * 2


def test_competing_readers_all_finish() -> None:
    """There are more large replies than slots, and each reply is read only when no more work is
    possible. All requests finish, in a number of steps bounded by their work, repeated work
    included."""
    simulation = Simulation(slots=2)
    requests = [outputs_request(str(i), [i] * 320, range(320)) for i in range(4)]
    sequences = [simulation.add(request)[0] for request in requests]
    steps = 0
    while any(sequence.state is not State.FINISHED for sequence in sequences):
        if not simulation.scheduler.has_work():
            for sequence in sequences:  # readers take everything, and only then
                while sequence.credit < CHUNKS_IN_FLIGHT:
                    simulation.scheduler.grant(sequence)
        simulation.step()
        steps += 1
    assert states(sequences) == [State.FINISHED] * 4
    assert [simulation.rows[s] for s in sequences] == [list(range(320))] * 4
    # Ten pieces each, two at a time: five turns, and everything may be computed again before each.
    assert steps <= 4 * 5 * (320 // CHUNK + CHUNKS_IN_FLIGHT)


@dataclass
class Mix:
    """A random load of prompts made of a few blocks, so that they share prefixes."""

    rng: random.Random
    simulation: Simulation
    open: list[Sequence] = field(default_factory=list)
    generated: list[Sequence] = field(default_factory=list)
    count: int = 0

    def prompt(self) -> list[int]:
        ended = [s for s in self.generated if s.state is State.FINISHED]
        if self.simulation.share_decoded and ended and self.rng.random() < 0.7:
            return ended[-1].tokens + [0] * self.rng.randint(1, BLOCK)
        whole = [self.rng.randrange(2) for _ in range(self.rng.randrange(5))]
        if self.simulation.share_decoded:  # a few tokens beyond the end of the block
            return blocks(*whole, rest=BLOCK - self.rng.randint(1, 4))
        return blocks(*whole, rest=self.rng.randrange(BLOCK)) or [0]

    def add(self) -> None:
        self.count += 1
        prompt, name = self.prompt(), str(self.count)
        if self.rng.random() < 0.3:
            positions = sorted(
                self.rng.sample(range(len(prompt)), self.rng.randint(1, len(prompt)))
            )
            self.open += self.simulation.add(outputs_request(name, prompt, positions))
        else:
            n = self.rng.choice([1, 1, 1, 2, 4])
            max_tokens = self.rng.randint(1, 6 if self.simulation.share_decoded else 40)
            request = generation(name, prompt, n=n, max_tokens=max_tokens)
            sequences = self.simulation.add(request, n)
            self.open += sequences
            self.generated += sequences

    def act(self) -> None:
        chance = self.rng.random()
        if chance < 0.3:
            self.add()
        elif chance < 0.4 and self.open:
            self.simulation.scheduler.remove(self.rng.choice(self.open))
        elif chance < 0.6 and self.open:
            self.simulation.scheduler.grant(self.rng.choice(self.open))
        elif self.simulation.scheduler.has_work():
            self.simulation.step()
        self.open = [s for s in self.open if s.state is not State.FINISHED]


@pytest.mark.parametrize("share_decoded", [False, True])
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 45))]
)
def test_random_mixes(seed: int, share_decoded: bool) -> None:
    """Every rule of `Simulation.step` holds in every step, and all requests end. If decoded tokens
    are shared, some prompts begin with text that other requests have generated."""
    rng = random.Random(seed)
    simulation = Simulation(
        slots=rng.randint(1, 6),
        prefill_chunk=BLOCK * rng.randint(1, 5),
        prefix_reuse=rng.random() < 0.9,
        share_decoded=share_decoded,
    )
    mix = Mix(rng, simulation)
    for _ in range(150):
        mix.act()
    for sequence in mix.open:
        for _ in range(1000):
            simulation.scheduler.grant(sequence)
    simulation.drain()
    assert states(mix.open) == [State.FINISHED] * len(mix.open)
    assert simulation.scheduler.slots.used == 0
    arrivals = [int(sequence.request_id) for sequence in simulation.admitted]
    assert arrivals == sorted(arrivals)
