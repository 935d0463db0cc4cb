"""Scheduler: which sequences the next step computes.

Sequences are admitted by priority, callers in turn, each caller's in the order of arrival
(`queue.py`), and prompts that are being computed take turns in the same way. A step prefills at
most `prefill_chunk` positions, shared by as many prompts as fit, and decodes every running sequence
once; so a long prompt delays a running sequence by one chunk at most, and never starves it. While
others decode, a chunk may be shorter: as much as the time has room for that their tokens should
take (`budget.py`). What generates is not preempted: once admitted it can finish. Knows tokens and
slots, not tensors.

A sequence whose reader is behind computes nothing and needs no slot. It keeps it until another
sequence waits for one: then whoever has been behind the longest is evicted (PAUSED), and comes back
into the queue when its reader has taken all that was computed. Its prefix is then copied, or
computed again in the same blocks, which gives the same bits; what was handed out before is not
handed out again. The other way, to let slow readers have a share of the slots and to end those that
read below some rate, would need a rate that is right for every network, and would hold back a share
of the slots from whoever waits. What eviction costs is bounded: each comes after CHUNKS_IN_FLIGHT
new pieces, and costs the prefill of one prompt at most, which waits for its turn like a new one. So
everybody goes on, and without contention nothing changes. Rows that wait for a reader take memory:
at most as many sequences as there are slots are PAUSED, and where another had to be, the one that
has been behind the longest is given up (`StepPlan.given_up`).

Outputs (logits, hidden states, attention weights) and interventions cost elements (`cost.py`). The
prompts of a step have STEP_ELEMENTS of them at most, and so have the generated positions of
sequences whose stages are changed (tapped): those that do not fit decode in a later step, in turn.
Work is heavy that makes a step many times as long as decoding does: LARGE elements or more, tapped
sequences, a piece of an attribution. After such a step none of it runs beside decoding for COOLDOWN
times as long as that step took. So it takes a bounded part of the memory and about doubles the time
between the tokens of others at most. Every step is short, so the request of a client that has left
ends soon.

Attributions take no slot and no share of these limits: `attributions.py` says whose piece a step
computes.

Where drafts are on, a decode step also verifies drafted tokens (`ngram.py`), as long as it has few
rows. A sequence with a constraint has none: its mask depends on every token before.
"""

import bisect
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from logitd.model.inference.engine.attributions import AttributionTurns
from logitd.model.inference.engine.budget import ChunkLengths, PrefillBudget, positions_for
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.ngram import Draft, Drafter, split_evenly
from logitd.model.inference.engine.queue import WaitingQueue
from logitd.model.inference.engine.sequence import CHUNKS_IN_FLIGHT, Sequence, State
from logitd.model.inference.engine.slots import SlotPool
from logitd.model.inference.options import DRAFTED_ROWS
from logitd.model.transformer.config import BLOCK

STEP_ELEMENTS = 2**21
"""Elements of the prompts of one step; a single block of positions may have more. As many of tapped
sequences that decode; a single one may have more."""
LARGE = 2**20
"""Elements of a step after which the sequences that decode have the engine for a while."""
COOLDOWN = 2
"""That while, in times of the step. By itself it makes the time between two tokens at most
1 + 1 / COOLDOWN times as long; writing the reply takes from the same processors."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions [start, end) of one sequence's prompt. `copy_from`, on a first chunk, is the slot
    that holds positions [0, start) already."""

    sequence: Sequence
    start: int
    end: int
    copy_from: int | None = None

    @property
    def completes_prompt(self) -> bool:
        return self.end == self.sequence.prompt_length


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of a step. `drafts` are of sequences that decode in it; `given_up` are sequences
    whose readers are behind, for whose rows there is no memory left; `evicted` is how many lost
    their slots to others. `attribution` is whose piece is computed after all this."""

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[Sequence, ...]
    drafts: dict[Sequence, Draft] = field(default_factory=dict)
    given_up: tuple[Sequence, ...] = ()
    evicted: int = 0
    attribution: Sequence | None = None

    def __bool__(self) -> bool:
        """Whether there is a forward of the cache's sequences."""
        return bool(self.prefill or self.decode)

    @property
    def continuing(self) -> tuple[Sequence, ...]:
        """Those of `decode` that will decode in the next step too, unless their next token ends
        them. Empty where that cannot be said, or such a step cannot be launched ahead: with
        prompts in the step, drafts, or a sequence that is tapped."""
        if self.prefill or any(s.drafter is not None or s.tapped for s in self.decode):
            return ()
        return tuple(sequence for sequence in self.decode if sequence.tokens_left > 1)


class Scheduler:
    """Queue, running set and slots; turns them into one `StepPlan` after another.

    `share_decoded` says whether what a sequence generated can be shared like its prompt.
    """

    def __init__(self, config: EngineConfig, *, share_decoded: bool = False) -> None:
        self.config = config
        self._share_decoded = share_decoded
        self.step_elements = STEP_ELEMENTS
        self.slots = SlotPool(config.slots)
        self.waiting = WaitingQueue()
        self.attributions = AttributionTurns()
        target = config.target_gap
        self._budget = None if target is None else PrefillBudget(target, config.prefill_chunk)
        self.running: list[Sequence] = []  # in order of admission
        self.paused: dict[Sequence, None] = {}  # without a slot, in order of eviction
        self._behind: dict[Sequence, None] = {}  # with one, the longest first
        self._step = 0
        self._began: dict[str, int] = {}  # the step of each caller's last first chunk
        self._planned_at = 0.0
        self._reserved_elements = 0  # of prompts, in the present step
        self._cooldown_until = 0.0

    def enqueue(self, sequence: Sequence, *, held: bool = False) -> None:
        """Queue behind all of the same caller and priority; `held` until `release`."""
        if sequence.attribution is not None:
            self.attributions.enqueue(sequence, held=held)
        else:
            self.waiting.push(sequence, held=held)

    def release(self) -> None:
        """The weights that the held ones wait for are there; what slots hold is of other ones."""
        self.slots.forget()
        self.waiting.release()
        self.attributions.waiting.release()

    def grant(self, sequence: Sequence) -> None:
        """The reader of a sequence's outputs took a piece. Once it has taken all of them, a PAUSED
        sequence waits for a slot."""
        sequence.credit += 1
        if sequence.may_compute:
            sequence.paused_at = None
            self._behind.pop(sequence, None)
        if sequence.state is State.PAUSED and sequence.credit >= CHUNKS_IN_FLIGHT:
            del self.paused[sequence]
            sequence.state = State.WAITING
            self.waiting.push(sequence)

    def charge(self, sequence: Sequence, rows: int, now: float) -> None:
        """A piece of so many rows of a sequence's outputs is handed out."""
        sequence.credit -= 1
        sequence.handed_out += rows
        if not sequence.may_compute:
            sequence.paused_at = now
            self._behind[sequence] = None

    def has_work(self) -> bool:
        """Whether the next plan would have work: a sequence can compute, or can be admitted."""
        if any(sequence.may_compute for sequence in self.running):
            return True
        if self.attributions.has_work():
            return True
        has_room = bool(self._behind) or self.slots.used < self.slots.total
        return has_room and any(self._firsts())

    def plan(self, now: float) -> StepPlan:
        """Admit what fits and choose the work of the next step."""
        self._step += 1
        self._planned_at, self._reserved_elements = now, 0
        evicted = self._admit(now)
        decode = tuple(s for s in self.running if s.state is State.DECODE)
        beside = any(not sequence.tapped for sequence in decode)
        cooldown = beside and now < self._cooldown_until
        if len(decode) > 1 and any(sequence.tapped for sequence in decode):
            decode = self._decode_in_turn(decode, cooldown=cooldown)
        return StepPlan(
            prefill=tuple(
                self._prefill_chunks(cooldown=cooldown, beside=beside, work=self._work(decode))
            ),
            decode=decode,
            drafts=self._drafts(decode) if self.config.speculate == "ngram" else {},
            given_up=self._given_up(),
            evicted=evicted,
            attribution=None if cooldown else self.attributions.next(now),
        )

    def stepped(
        self,
        plan: StepPlan,
        now: float,
        prefill_seconds: float | None = None,
        *,
        together: bool = False,
    ) -> None:
        """A step has been computed, and its prompts took so long of it, if that is known; or they
        were one pass `together` with what was decoded. After heavy work those that decode as usual
        have the engine to themselves for a while."""
        heavy = (
            self._reserved_elements >= LARGE
            or plan.attribution is not None
            or any(chunk.sequence.tapped for chunk in plan.prefill)
            or any(sequence.tapped for sequence in plan.decode)
        )
        if heavy:
            self._cooldown_until = now + COOLDOWN * (now - self._planned_at)
        elif self._budget is not None and (together or prefill_seconds is not None):
            self._note_costs(self._budget, plan, now - self._planned_at, prefill_seconds)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it was doing. Its slot is free for the next step."""
        if sequence.attribution is not None:
            self.attributions.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.PAUSED:
            del self.paused[sequence]
        else:
            self.running.remove(sequence)
            self._behind.pop(sequence, None)
            assert sequence.slot is not None
            if self._share_decoded and sequence.state is State.DECODE and not sequence.tapped:
                computed = sequence.tokens[: sequence.computed]
                self.slots.set_contents(sequence.slot, _whole_blocks(computed))
            self.slots.release(sequence.slot, self._step)
            sequence.slot = None
        sequence.state = State.FINISHED

    def prefilled(self, chunk: PrefillChunk, now: float) -> None:
        """Account for a computed chunk; its whole blocks can be shared from now on."""
        sequence = chunk.sequence
        assert sequence.slot is not None
        sequence.computed = chunk.end
        if not sequence.tapped:
            self.slots.set_contents(sequence.slot, _whole_blocks(sequence.tokens[: chunk.end]))
        if chunk.completes_prompt:
            sequence.state = State.DECODE
            sequence.prefilled = now
            if (
                self.config.speculate == "ngram"
                and sequence.matcher is None
                and not sequence.tapped
            ):
                sequence.drafter = Drafter(sequence.tokens)

    def check_integrity(self) -> None:
        """Every slot has one owner or none, and no sequence runs without one (for tests)."""
        slots = [sequence.slot for sequence in self.running]
        assert len(slots) == len(set(slots)), f"a slot is shared: {slots}"
        assert set(slots) == self.slots.owned(), f"{slots} in use, {self.slots.owned()} owned"
        assert all(s.state in (State.PREFILL, State.DECODE) for s in self.running)
        waiting = list(self.waiting)
        assert len(waiting) == len(set(waiting)) == len(self.waiting)
        assert all(s.state is State.WAITING and s.slot is None for s in waiting)
        assert all(s.state is State.PAUSED and s.slot is None for s in self.paused)
        assert all(s.credit < CHUNKS_IN_FLIGHT for s in self.paused)
        assert len(self.paused) <= self.slots.total
        assert set(self._behind) == {s for s in self.running if not s.may_compute}
        self.attributions.check_integrity()

    def _drafts(self, decode: tuple[Sequence, ...]) -> dict[Sequence, Draft]:
        """Drafts for the decoding sequences, within the rows that a step may have. The last token
        that a sequence may generate needs no row after it."""
        rows_left = DRAFTED_ROWS - len(decode)
        if rows_left <= 0:
            return {}
        drafts: dict[Sequence, Draft] = {}
        for sequence in decode:
            drafter = sequence.drafter
            if drafter is not None and (draft := drafter.guess(rows_left, len(decode))) is not None:
                del draft.token_ids[sequence.tokens_left - 1 :]
                drafts[sequence] = draft
        if not drafts:
            return drafts
        counts = split_evenly([len(draft.token_ids) for draft in drafts.values()], rows_left)
        for draft, count in zip(drafts.values(), counts, strict=True):
            del draft.token_ids[count:]
        return {sequence: draft for sequence, draft in drafts.items() if draft.token_ids}

    def _admit(self, now: float) -> int:
        """Admit what there are slots for; how many sequences were evicted for it."""
        evicted = 0
        while self.waiting:
            full = self.slots.used == self.slots.total
            if full and not self._behind:
                break
            if (admitted := self._next()) is None:
                break
            sequence, source, length = admitted
            if full:
                self._evict(next(iter(self._behind)))
                evicted += 1
            slot = self.slots.acquire(self._step, preferred=source if length else None)
            assert slot is not None
            self.waiting.take(sequence)
            sequence.slot = slot
            sequence.state = State.PREFILL
            sequence.admitted_step = self._step
            if sequence.admitted is None:
                sequence.admitted = now
            self.running.append(sequence)
        return evicted

    def _firsts(self) -> Iterable[Sequence]:
        """Of each caller the sequence that may be admitted next, in the order of turns."""
        return self.waiting.firsts()

    def _next(self) -> tuple[Sequence, int, int] | None:
        """The sequence to be admitted next, a slot to copy from, and how many positions. A caller
        whose next sequence is better off waiting for a sibling is passed over; there are at most as
        many as there are slots."""
        for sequence in self._firsts():
            source, length = self._shared_prefix(sequence)
            if not self._sibling_computes_more(sequence, length):
                return sequence, source, length
        return None

    def _evict(self, sequence: Sequence) -> None:
        """Take the slot of a sequence whose reader is behind. What the slot holds stays to be
        copied until somebody writes over it."""
        assert sequence.slot is not None
        self.running.remove(sequence)
        del self._behind[sequence]
        self.slots.release(sequence.slot, self._step)
        sequence.slot, sequence.state, sequence.computed = None, State.PAUSED, 0
        self.paused[sequence] = None

    def _sibling_computes_more(self, sequence: Sequence, length: int) -> bool:
        """Whether a sequence of the same prompt is still computing blocks that this one will then
        copy, more than the `length` shared now. Nothing is lost by waiting: prompts are computed in
        this order anyway."""
        shareable, running = sequence.first_needed // BLOCK * BLOCK, self.running
        return (
            self._reuses_prefix(sequence)
            and length < shareable
            and any(s.group is sequence.group and s.state is State.PREFILL for s in running)
        )

    def _shared_prefix(self, sequence: Sequence) -> tuple[int, int]:
        """A slot to copy from, and how many positions before the first one whose hidden state
        the sequence needs."""
        if not self._reuses_prefix(sequence):
            return 0, 0
        return self.slots.longest_prefix(sequence.tokens[: sequence.first_needed + 1])

    def _reuses_prefix(self, sequence: Sequence) -> bool:
        allowed = self.config.prefix_reuse and sequence.request.prefix_reuse
        return allowed and not sequence.tapped

    def _work(self, decode: tuple[Sequence, ...]) -> float:
        """How much work of prompts, as `budget.py` counts it, there is time for beside these."""
        return math.inf if self._budget is None or not decode else self._budget.work()

    def _note_costs(
        self,
        budget: PrefillBudget,
        plan: StepPlan,
        seconds: float,
        prefill_seconds: float | None,
    ) -> None:
        """Of an ordinary step; outputs and scores would make a prompt cost what others do not."""
        if plan.decode and prefill_seconds is not None:
            budget.decoded(seconds - prefill_seconds)
        chunks = plan.prefill
        if chunks and all(
            c.sequence.outputs is None and c.sequence.scores_from is None for c in chunks
        ):
            lengths = ChunkLengths([c.end - c.start for c in chunks])
            if prefill_seconds is None:
                budget.together(lengths, seconds)
            else:
                budget.prefilled(lengths, prefill_seconds)

    def _prefill_chunks(self, *, cooldown: bool, beside: bool, work: float) -> list[PrefillChunk]:
        """The prompts of the step, callers in turn and each caller's in order of admission, within
        `prefill_chunk` positions and so much work, or one block in any case. `beside` others that
        decode, one of them is tapped at most, and none in a cooldown."""
        chunks: list[PrefillChunk] = []
        room = self.config.prefill_chunk  # in positions
        if work != math.inf:
            room = max(BLOCK, min(room, positions_for(work)))
        tapped_left = 0 if cooldown else 1 if beside else self.config.slots
        for sequence in self._prompts_in_turn():
            if room and not (sequence.tapped and not tapped_left):
                chunk = self._chunk(sequence, room, cooldown)
                if chunk is not None:
                    self._reserve(chunk)
                    room -= -(-(chunk.end - chunk.start) // BLOCK) * BLOCK
                    chunks.append(chunk)
                    tapped_left -= sequence.tapped
        return chunks

    def _given_up(self) -> tuple[Sequence, ...]:
        """Who is PAUSED beyond as many as there are slots: those that have been behind the
        longest."""
        excess = len(self.paused) - self.slots.total
        if excess <= 0:
            return ()
        return tuple(sorted(self.paused, key=_behind_since)[:excess])

    def _prompts_in_turn(self) -> list[Sequence]:
        """The prompts that can be computed. Of one caller, in order of admission. Of several, those
        that were begun come first; then the first of each caller, whoever began one last being the
        last, then the second of each, and so on."""
        prompts = [s for s in self.running if s.state is State.PREFILL and s.may_compute]
        if len({sequence.request.caller for sequence in prompts}) <= 1:
            return prompts
        places: list[tuple[int, int, bool]] = []  # of each in the order
        counts: Counter[str] = Counter()
        for sequence in prompts:
            caller = sequence.request.caller
            if sequence.computed:
                places.append((-1, 0, False))
            else:
                began, came = self._began.get(caller, -1), sequence.admitted_step
                places.append((counts[caller], max(began, came), began >= came))
                counts[caller] += 1
        order = sorted(range(len(prompts)), key=places.__getitem__)
        return [prompts[index] for index in order]

    def _chunk(self, sequence: Sequence, budget: int, cooldown: bool) -> PrefillChunk | None:
        """The next positions of a prompt; None if their elements do not fit into this step. Changes
        nothing: `_reserve` does."""
        # 1) It begins after what is computed, or after a prefix that another slot has.
        copy_from, start = None, sequence.computed
        if start == 0:
            source, start = self._shared_prefix(sequence)
            copy_from = source if start else None
        # 2) It ends with the budget of positions or with the prompt,
        end = min(start + budget, sequence.prompt_length)
        # 3) or earlier, after a whole block, if it would have too many elements. The first block of
        # a step may have too many, or it could never be computed.
        left = max(0, self.step_elements - self._reserved_elements)
        first = min(start + BLOCK, end)
        while (elements := _elements(sequence, start, end)) > left and end > first:
            end = max(first, (end - 1) // BLOCK * BLOCK)
        if (elements > left and self._reserved_elements) or (cooldown and elements >= LARGE):
            return None
        return PrefillChunk(sequence, start, end, copy_from)

    def _decode_in_turn(
        self, decode: tuple[Sequence, ...], *, cooldown: bool
    ) -> tuple[Sequence, ...]:
        """All that are not tapped; and, unless they rest in a cooldown, those tapped ones that have
        waited the longest, as many as fit into a step and one at least."""
        elements = 0
        tapped = [] if cooldown else [sequence for sequence in decode if sequence.tapped]
        for index, sequence in enumerate(sorted(tapped, key=lambda each: each.decoded_step)):
            elements += sequence.group.cost.row
            if index and elements > self.step_elements:
                break
            sequence.decoded_step = self._step
        return tuple(s for s in decode if not s.tapped or s.decoded_step == self._step)

    def _reserve(self, chunk: PrefillChunk) -> None:
        """Charge a chunk's elements to the step; before a prompt's first chunk, declare that its
        slot holds the copied prefix."""
        sequence = chunk.sequence
        self._reserved_elements += _elements(sequence, chunk.start, chunk.end)
        if sequence.computed == 0:
            assert sequence.slot is not None
            self._note_began(sequence.request.caller)
            sequence.computed = chunk.start
            if not sequence.handed_out:  # not evicted meanwhile
                sequence.cached = chunk.start
            # Chunks run in the order planned here: from now on the slot holds the prefix alone.
            self.slots.set_contents(sequence.slot, sequence.tokens[: chunk.start])

    def _note_began(self, caller: str) -> None:
        self._began[caller] = self._step
        if len(self._began) > len(self.running):  # some have left
            callers = {sequence.request.caller for sequence in self.running}
            self._began = {name: step for name, step in self._began.items() if name in callers}


def _elements(sequence: Sequence, start: int, end: int) -> int:
    """Elements of a sequence's prompt at positions [start, end): of outputs, as far as they are
    still to be handed out, and of interventions."""
    cost = sequence.group.cost
    elements = cost.position * (end - start)
    if (request := sequence.outputs) is not None:
        first, last = _between(request.positions, sequence.handed_out, start, end)
        elements += (last - first) * cost.output
    return elements


def _between(positions: tuple[int, ...], handed_out: int, start: int, end: int) -> tuple[int, int]:
    """Where those of ascending positions that are in [start, end) begin and end, without the first
    `handed_out`."""
    first = max(handed_out, bisect.bisect_left(positions, start))
    return first, max(first, bisect.bisect_left(positions, end))


def _behind_since(sequence: Sequence) -> float:
    return math.inf if sequence.paused_at is None else sequence.paused_at


def _whole_blocks(token_ids: list[int]) -> list[int]:
    return token_ids[: len(token_ids) - len(token_ids) % BLOCK]
