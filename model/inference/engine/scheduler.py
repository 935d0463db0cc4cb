"""Scheduler: chooses the sequences that the next step computes.

Sequences are admitted by priority; within a priority the callers take turns (`queue.py`). Admitted
prompts take turns in the same way. A step decodes every running sequence once, with the exceptions
below. It also prefills up to `prefill_chunk` positions, or fewer while sequences decode
(`budget.py`), of as many prompts as fit. Running sequences are never preempted: an admitted
sequence can finish.

If the reader of a sequence's outputs is behind, the sequence keeps its slot, but computes nothing.
When another sequence needs a slot, the sequence that has been behind the longest is evicted
(PAUSED). It returns to the queue when its reader has taken everything; then its prefix is copied,
or computed again in the same blocks with the same bits. A sequence delivers at least
CHUNKS_IN_FLIGHT pieces between two evictions, and an eviction costs at most the prefill of one
prompt, so all sequences make progress. (Ending the requests of slow readers instead would require a
minimum rate that suits every network.) The unread rows of paused sequences take memory. So at most
as many sequences are PAUSED as there are slots; beyond that, the sequences that have been behind
the longest are ended.

Outputs and interventions cost elements (`cost.py`). In one step the prompts may cost up to
STEP_ELEMENTS, and so may the rows of tapped sequences, whose stages are recorded or changed; tapped
sequences that do not fit decode in a later step, in turn. A step is heavy if it has LARGE elements
or more, a tapped sequence, or a piece of an attribution. After a heavy step, there is a cooldown of
COOLDOWN times its duration, in which no heavy work is done while plain sequences decode. So heavy
work increases the time per token of other sequences to at most about twice its usual value.

Masks of constraints are computed here, before a step begins, because their time is not known in
advance. Sequences whose masks do not fit into MASK_SECONDS decode in a later step, in turn. So
expensive constraints delay other sequences by a bounded time per token. When a sequence decodes
never changes its tokens. A matcher that takes long to compile is compiled by another thread when
its sequence has a slot, so waiting sequences need no memory for it; the prompt waits until then.

Attributions take no slot (`attributions.py`). If attributions and other heavy work wait, each gets
half of the time, so a short attribution does not wait for a queue of heavy prompts.

Rules between callers are in `callers.py`, limits on the positions of a step in `budget.py`.

With speculation, a decode step with few rows also verifies drafted tokens (`ngram.py`). A sequence
with a constraint gets no drafts, because its mask depends on every earlier token.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from logitd.model.inference.engine.attributions import AttributionTurns
from logitd.model.inference.engine.budget import PrefillBudget, Waiting
from logitd.model.inference.engine.callers import (
    CallerTurns,
    leaves_rows,
    waits_for_sibling,
)
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.ngram import Draft, Drafter, split_evenly
from logitd.model.inference.engine.queue import WaitingQueue
from logitd.model.inference.engine.sequence import CHUNKS_IN_FLIGHT, Sequence, State
from logitd.model.inference.engine.slots import SlotPool
from logitd.model.inference.options import DRAFTED_ROWS
from logitd.model.transformer.config import BLOCK

STEP_ELEMENTS = 2**21
"""Limit of a step's elements, for its prompts and for its tapped rows. A single block of positions
or a single row may exceed it. `MOST_CHANGED` (`cost.py`) limits what interventions cost there."""
LARGE = 2**20
"""A step with at least this many elements is heavy."""
COOLDOWN = 2
"""Duration of a cooldown, as a multiple of the heavy step's. It limits the mean time between two
tokens to 1 + 1 / COOLDOWN times the usual value, not counting the processor time that writing the
replies of heavy requests takes."""

MASK_SECONDS = 0.03
"""Seconds in which a step begins to compute masks. The last mask may exceed them (about 8 ms:
`model/inference/constraints/compiler.py`). A usual mask takes less than a millisecond."""


MATCHER_SECONDS = 0.002
"""Seconds that a step with nothing else to compute waits for the matcher of a prompt."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions [start, end) of a sequence's prompt. `copy_from` is set on the first chunk if
    another slot holds positions [0, start)."""

    sequence: Sequence
    start: int
    end: int
    copy_from: int | None = None

    @property
    def completes_prompt(self) -> bool:
        return self.end == self.sequence.prompt_length


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of a step.

    drafts       drafts of sequences in `decode`
    given_up     sequences to end, because their readers have been behind the longest
    evicted      number of sequences that lost their slots
    attribution  sequence whose piece is computed after everything else
    """

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[Sequence, ...]
    drafts: dict[Sequence, Draft] = field(default_factory=dict)
    given_up: tuple[Sequence, ...] = ()
    evicted: int = 0
    attribution: Sequence | None = None

    def __bool__(self) -> bool:
        """True if the runner has to compute a forward pass over the cache."""
        return bool(self.prefill or self.decode)

    def decoding_after(self, steps: int) -> tuple[Sequence, ...]:
        """Sequences that still decode after this number of steps, unless a token ends them. Empty
        if this plan has prompts, drafts or tapped sequences, because then no later step can be
        launched early."""
        if self.prefill or any(s.drafter is not None or s.tapped for s in self.decode):
            return ()
        return tuple(sequence for sequence in self.decode if sequence.tokens_left > steps)


class Scheduler:
    """The queue, the running sequences and the slots. `plan` chooses the work of each step.

    `share_decoded`: prompts may copy the keys and values of generated tokens, not only of prompts.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        share_decoded: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._clock = clock
        self._share_decoded = share_decoded
        self.step_elements = STEP_ELEMENTS
        self.slots = SlotPool(config.slots)
        self.waiting = WaitingQueue()
        self.attributions = AttributionTurns()
        self._callers = CallerTurns()
        self._budget = PrefillBudget(config.target_gap, config.target_ttft, config.prefill_chunk)
        self.running: list[Sequence] = []  # in order of admission
        self.paused: dict[Sequence, None] = {}  # without a slot, in order of eviction
        self._behind: dict[Sequence, None] = {}  # with a slot, longest behind first
        self._step = 0
        self._planned_at = 0.0
        self._reserved_elements = 0  # by prompts, in the current step
        self._cooldown_until = 0.0
        self._prompts_ahead = 0.0  # seconds of other heavy work that attributions may catch up on

    def enqueue(self, sequence: Sequence, *, held: bool = False) -> None:
        self._callers.arrived(sequence)
        if sequence.attribution is not None:
            self.attributions.waiting.push(sequence, held=held)
        else:
            self.waiting.push(sequence, held=held)

    def release(self) -> None:
        """Allow held sequences to be admitted, once their weights are loaded. Forgets the contents
        of all slots, because the old weights computed them."""
        self.slots.forget()
        self.waiting.release()
        self.attributions.waiting.release()

    def grant(self, sequence: Sequence) -> None:
        """Record that the reader of a sequence's outputs took a piece. A PAUSED sequence returns to
        the queue when its reader has taken all pieces."""
        sequence.credit += 1
        if sequence.may_compute:
            sequence.paused_at = None
            self._behind.pop(sequence, None)
        if sequence.state is State.PAUSED and sequence.credit >= CHUNKS_IN_FLIGHT:
            del self.paused[sequence]
            sequence.state = State.WAITING
            self.waiting.push(sequence)

    def charge(self, sequence: Sequence, rows: int, now: float) -> None:
        """Record that a piece of a sequence's outputs, with this number of rows, was delivered."""
        sequence.credit -= 1
        sequence.handed_out += rows
        if not sequence.may_compute:
            sequence.paused_at = now
            self._behind[sequence] = None

    def has_work(self) -> bool:
        """True if a sequence can compute, be admitted, or waits for its matcher. Only in the last
        case the next plan may be empty."""
        return (
            any(sequence.may_compute for sequence in self.running)
            or self.attributions.has_work()
            or (self._has_room() and any(self.waiting.firsts()))
        )

    def plan(self, now: float) -> StepPlan:
        """Admit what fits and choose the work of the next step."""
        self._step += 1
        self._planned_at, self._reserved_elements = now, 0
        evicted = self._admit(now)
        decode = tuple(s for s in self.running if s.state is State.DECODE)
        has_untapped_decode = any(not sequence.tapped for sequence in decode)
        cooldown = has_untapped_decode and now < self._cooldown_until
        attributes = self.attributions.has_work()
        if not attributes:
            self._prompts_ahead = 0.0
        light = cooldown or self._prompts_ahead > 0
        if light or (len(decode) > 1 and any(sequence.tapped for sequence in decode)):
            decode = self._decode_in_turn(decode, light=light)
        decode = self._with_masks(decode)
        tapped_prompts = 0 if light else 1 if has_untapped_decode else self.config.slots
        prompts = self._callers.in_turn(
            [s for s in self.running if s.state is State.PREFILL and s.may_compute]
        )
        prompts = self._with_matchers(prompts, idle=not (decode or attributes))
        positions = self.config.prefill_chunk
        if decode and prompts:
            waiting = (_waiting(sequence, now) for sequence in prompts)
            measures = not self._is_heavy((), decode)  # a heavy step is not recorded
            positions = self._budget.positions(len(decode), waiting, measures=measures)
        prefill = self._prefill_chunks(prompts, positions, tapped_prompts, light=light)
        attributes = attributes and not cooldown and not self._is_heavy(prefill, decode)
        return StepPlan(
            prefill=prefill,
            decode=decode,
            drafts=self._drafts(decode) if self.config.speculate == "ngram" else {},
            given_up=self._given_up(),
            evicted=evicted,
            attribution=self.attributions.next(now) if attributes else None,
        )

    def stepped(
        self,
        plan: StepPlan,
        now: float,
        prefill_seconds: float | None = None,
        *,
        together: bool = False,
    ) -> None:
        """Record the time of a computed step. `prefill_seconds` is the time of its prompts, if
        known. `together` is true if one pass computed both the prompts and the decode step. A heavy
        step begins a cooldown."""
        seconds = now - self._planned_at
        if plan.attribution is not None:
            self.attributions.charge(plan.attribution, seconds)
            self._prompts_ahead = max(0.0, self._prompts_ahead - seconds)
            self._cooldown_until = now + COOLDOWN * seconds
            return
        if self._is_heavy(plan.prefill, plan.decode):
            self._prompts_ahead += seconds
            self._cooldown_until = now + COOLDOWN * seconds
            return
        if plan.decode and prefill_seconds is not None:
            self._budget.decoded(len(plan.decode), seconds - prefill_seconds)
        # Prompts with outputs or scores cost more than plain ones: do not learn from them.
        prompts = [chunk.sequence for chunk in plan.prefill]
        if not prompts or any(s.outputs or s.scoring for s in prompts):
            return
        lengths = [chunk.end - chunk.start for chunk in plan.prefill]
        if prefill_seconds is not None:
            self._budget.prefilled(lengths, prefill_seconds)
        elif together:
            self._budget.together(len(plan.decode), lengths, seconds)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state. Its slot is free for the next step."""
        if sequence.attribution is not None:
            self.attributions.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.PAUSED:
            del self.paused[sequence]
        else:
            if self._share_decoded and sequence.state is State.DECODE:
                self._share(sequence, sequence.computed)
            self._behind.pop(sequence, None)
            self._leave_slot(sequence)
        sequence.state = State.FINISHED

    def prefilled(self, chunk: PrefillChunk, now: float) -> None:
        """Record a computed chunk. Its whole blocks can be shared from now on."""
        sequence = chunk.sequence
        sequence.computed = chunk.end
        self._share(sequence, chunk.end)
        if chunk.completes_prompt:
            sequence.state = State.DECODE
            sequence.prefilled = now
            free = sequence.matcher is None and not sequence.tapped
            if self.config.speculate == "ngram" and free:
                sequence.drafter = Drafter(sequence.tokens)

    def _drafts(self, decode: tuple[Sequence, ...]) -> dict[Sequence, Draft]:
        """Drafts of the decoding sequences, within DRAFTED_ROWS. A draft ends before the last token
        that its sequence may generate, because no row after that token is needed."""
        rows_left = DRAFTED_ROWS - len(decode)
        if rows_left <= 0:
            return {}
        drafts: dict[Sequence, Draft] = {}
        for sequence in decode:
            drafter = sequence.drafter
            if drafter is not None and (draft := drafter.guess(rows_left, len(decode))) is not None:
                del draft.token_ids[sequence.tokens_left - 1 :]
                drafts[sequence] = draft
        counts = split_evenly([len(draft.token_ids) for draft in drafts.values()], rows_left)
        for draft, count in zip(drafts.values(), counts, strict=True):
            del draft.token_ids[count:]
        return {sequence: draft for sequence, draft in drafts.items() if draft.token_ids}

    def _is_heavy(self, prefill: tuple[PrefillChunk, ...], decode: tuple[Sequence, ...]) -> bool:
        """True if the prompts or rows of the current step need a cooldown."""
        return (
            self._reserved_elements >= LARGE
            or any(chunk.sequence.tapped for chunk in prefill)
            or any(sequence.tapped for sequence in decode)
        )

    def _has_room(self) -> bool:
        return bool(self._behind) or self.slots.used < self.slots.total

    def _admit(self, now: float) -> int:
        """Admit sequences while slots are available. Returns the number of evicted sequences."""
        evicted = 0
        while self._has_room() and (admitted := self._next(now)) is not None:
            sequence, source, length = admitted
            if self.slots.used == self.slots.total:
                self._evict(next(iter(self._behind)))
                evicted += 1
            self.waiting.take(sequence)
            sequence.slot = self.slots.acquire(self._step, preferred=source if length else None)
            sequence.state = State.PREFILL
            sequence.admitted_step = self._step
            if sequence.admitted is None:
                sequence.admitted = now
            self.running.append(sequence)
        return evicted

    def _next(self, now: float) -> tuple[Sequence, int, int] | None:
        """The next sequence to admit, the slot to copy its prefix from, and the length of the
        prefix. A sequence that must wait for others (`callers.py`) is skipped, together with all
        other sequences of its caller."""
        slots, running = self.slots.total, self.running
        for sequence in self.waiting.firsts():
            if self._callers.leaves_slots(sequence, running, slots, now) and leaves_rows(
                sequence, running, self.step_elements
            ):
                source, length = self._shared_prefix(sequence)
                reuses = self._reuses_prefix(sequence)
                if not (reuses and waits_for_sibling(sequence, length, running)):
                    return sequence, source, length
        return None

    def _evict(self, sequence: Sequence) -> None:
        """Take the slot from a sequence whose reader is behind. The slot's contents can still be
        copied."""
        del self._behind[sequence]
        self._leave_slot(sequence)
        sequence.state, sequence.computed = State.PAUSED, 0
        self.paused[sequence] = None

    def _leave_slot(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.slots.release(sequence.held_slot, self._step)
        sequence.slot = None

    def _share(self, sequence: Sequence, length: int) -> None:
        """Allow others to copy the whole blocks of a sequence's first `length` tokens, unless it is
        tapped."""
        if not sequence.tapped:
            whole = length - length % BLOCK
            self.slots.set_contents(sequence.held_slot, sequence.tokens[:whole])

    def _shared_prefix(self, sequence: Sequence) -> tuple[int, int]:
        """The slot that shares the longest prefix, and that prefix's length. The prefix ends before
        the first position that must be computed."""
        if not self._reuses_prefix(sequence):
            return 0, 0
        return self.slots.longest_prefix(sequence.tokens[: sequence.first_needed + 1])

    def _reuses_prefix(self, sequence: Sequence) -> bool:
        allowed = self.config.prefix_reuse and sequence.request.prefix_reuse
        return allowed and not sequence.tapped

    def _prefill_chunks(
        self, prompts: list[Sequence], positions: int, tapped: int, *, light: bool
    ) -> tuple[PrefillChunk, ...]:
        """The next chunks of these prompts, in turn: at most `positions` positions and `tapped`
        tapped prompts."""
        chunks: list[PrefillChunk] = []
        for sequence in prompts:
            if not positions or (sequence.tapped and not tapped):
                continue
            chunk = self._chunk(sequence, positions, light=light)
            if chunk is not None:
                self._reserve(chunk)
                positions -= -(-(chunk.end - chunk.start) // BLOCK) * BLOCK
                tapped -= sequence.tapped
                chunks.append(chunk)
        return tuple(chunks)

    def _given_up(self) -> tuple[Sequence, ...]:
        """The PAUSED sequences that have been behind the longest, if more are PAUSED than there are
        slots."""
        excess = max(0, len(self.paused) - self.slots.total)
        return tuple(sorted(self.paused, key=_behind_since)[:excess])

    def _chunk(self, sequence: Sequence, budget: int, *, light: bool) -> PrefillChunk | None:
        """The next chunk of a prompt, at most `budget` positions long; None if its elements do not
        fit into this step."""
        # 1) Begin after the computed positions, or after the prefix of another slot.
        copy_from, start = None, sequence.computed
        if start == 0:
            source, start = self._shared_prefix(sequence)
            copy_from = source if start else None
        # 2) End at the budget or at the end of the prompt.
        end = min(start + budget, sequence.prompt_length)
        # 3) If that has too many elements, end earlier, after a whole block. The first block of a
        # step may exceed the limit, or it could never be computed.
        left = max(0, self.step_elements - self._reserved_elements)
        first = min(start + BLOCK, end)
        while (elements := _elements(sequence, start, end)) > left and end > first:
            end = max(first, (end - 1) // BLOCK * BLOCK)
        if (elements > left and self._reserved_elements) or (light and elements >= LARGE):
            return None
        return PrefillChunk(sequence, start, end, copy_from)

    def _decode_in_turn(self, decode: tuple[Sequence, ...], *, light: bool) -> tuple[Sequence, ...]:
        """Choose the sequences that decode: all plain sequences and, unless the step is `light`,
        the tapped sequences that have waited the longest. Of the tapped sequences, as many decode
        as fit into `step_elements`, but at least one."""
        elements = 0
        tapped = [] if light else [sequence for sequence in decode if sequence.tapped]
        for index, sequence in enumerate(sorted(tapped, key=lambda each: each.decoded_step)):
            elements += sequence.group.cost.row
            if index and elements > self.step_elements:
                break
            sequence.decoded_step = self._step
        return tuple(s for s in decode if not s.tapped or s.decoded_step == self._step)

    def _with_masks(self, decode: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """Choose the sequences that decode: all without a constraint and, of the others, those that
        have waited the longest, as many as get their masks within MASK_SECONDS, but at least
        one."""
        due = [sequence for sequence in decode if sequence.matcher is not None]
        if not due:
            return decode
        began = self._clock()
        for index, sequence in enumerate(sorted(due, key=lambda each: each.masked_step)):
            if index and self._clock() - began > MASK_SECONDS:
                break
            sequence.masked_step = self._step
            assert sequence.matcher is not None
            with suppress(Exception):  # the runner asks again, and ends the sequence
                sequence.matcher.allowed()
        return tuple(s for s in decode if s.matcher is None or s.masked_step == self._step)

    def _with_matchers(self, prompts: list[Sequence], *, idle: bool) -> list[Sequence]:
        """Choose the prompts whose matchers are compiled. The first of the others in turn is
        compiled next. If the step has nothing to compute, wait a little for it."""
        ready = [s for s in prompts if s.matcher is None or s.matcher.prepare()]
        if idle and prompts and not ready:
            time.sleep(MATCHER_SECONDS)
        return ready

    def _reserve(self, chunk: PrefillChunk) -> None:
        """Charge a chunk's elements to the step. If the prompt has not begun, also record that its
        slot now holds only the prefix to copy. This is safe even if an earlier chunk of the plan
        copies the slot's old contents, because copies are made in the order of the plan."""
        sequence = chunk.sequence
        self._reserved_elements += _elements(sequence, chunk.start, chunk.end)
        if sequence.computed == 0:
            self._callers.began(sequence, self._step, self.running)
            sequence.computed = chunk.start
            if not sequence.handed_out:  # it was not evicted before
                sequence.cached = chunk.start
            self.slots.set_contents(sequence.held_slot, sequence.tokens[: chunk.start])


def _elements(sequence: Sequence, start: int, end: int) -> int:
    """Number of elements of a prompt's positions [start, end): elements that interventions change,
    and elements of outputs that have not been delivered yet."""
    cost = sequence.group.cost
    return cost.position * (end - start) + cost.output * len(sequence.positions_in(start, end))


def _waiting(sequence: Sequence, now: float) -> Waiting:
    """The description of a waiting prompt from which the budget plans a step. Only for a generation
    is a reader waiting for a first token."""
    left = sequence.prompt_length - sequence.computed
    return Waiting(left, None if sequence.generation is None else now - sequence.arrived)


def _behind_since(sequence: Sequence) -> float:
    return math.inf if sequence.paused_at is None else sequence.paused_at
