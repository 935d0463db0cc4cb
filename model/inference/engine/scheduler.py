"""Scheduler: which sequences the next step computes.

First come, first served, within a priority. A step prefills at most `prefill_chunk` positions,
shared by as many prompts as fit, and decodes every running sequence once; so a long prompt delays
a running sequence by one chunk at most, and never starves it. What was admitted can always finish:
there is no preemption. Knows tokens and slots, not tensors.

Outputs (logits, hidden states, attention weights) cost elements (`cost.py`). A step computes
OUTPUT_ELEMENTS of them at most. After a step with LARGE_OUTPUT or more, no other step with as many
runs beside decoding for OUTPUT_COOLDOWN times as long as that step took. So a large reply takes a
bounded part of the memory and about doubles the time between the tokens of others at most.

Where drafts are on, a decode step also verifies drafted tokens (`ngram.py`), as long as it has few
rows. A sequence with a constraint has none: its mask depends on every token before.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from model.inference.engine.config import EngineConfig
from model.inference.engine.ngram import Draft, Drafter, split_evenly
from model.inference.engine.requests import OutputsRequest
from model.inference.engine.sequence import Sequence, State
from model.inference.engine.slots import SlotPool
from model.inference.options import DRAFTED_ROWS
from model.transformer.config import BLOCK

OUTPUT_ELEMENTS = 2**21
"""Elements of outputs in one step; a single block of positions may have more."""
LARGE_OUTPUT = 2**20
"""Elements of a step after which the running sequences decode alone for a while."""
OUTPUT_COOLDOWN = 2
"""That while, in times of the step. By itself it makes the time between two tokens at most
1 + 1 / OUTPUT_COOLDOWN times as long; writing the reply takes from the same processors."""


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
    """The work of a step. `drafts` are of sequences that decode in it."""

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[Sequence, ...]
    drafts: dict[Sequence, Draft] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)

    @property
    def continuing(self) -> tuple[Sequence, ...]:
        """Those of `decode` that will decode in the next step too, unless their next token ends
        them. Empty where that cannot be said: with prompts in the step, or drafts."""
        if self.prefill or any(sequence.drafter is not None for sequence in self.decode):
            return ()
        return tuple(sequence for sequence in self.decode if sequence.tokens_left > 1)


class Scheduler:
    """Queue, running set and slots; turns them into one `StepPlan` after another.

    `position_elements` says how many elements a request's output at one position has;
    `share_decoded`, whether what a sequence generated can be shared like its prompt.
    """

    def __init__(
        self,
        config: EngineConfig,
        position_elements: Callable[[OutputsRequest], int],
        *,
        share_decoded: bool = False,
    ) -> None:
        self.config = config
        self._share_decoded = share_decoded
        self.output_elements = OUTPUT_ELEMENTS
        self._position_elements = position_elements
        self.slots = SlotPool(config.slots)
        self.waiting: list[Sequence] = []  # in order of admission to come
        self.running: list[Sequence] = []  # in order of admission
        self.only_started = False
        """While set, only siblings of admitted sequences are admitted: the weights are about to
        change, and a request is answered by one set of weights."""
        self._step = 0
        self._planned_at = 0.0
        self._reserved_elements = 0  # of outputs, in the present step
        self._output_cooldown_until = 0.0

    def enqueue(self, sequence: Sequence) -> None:
        """Queue behind all of the same or a lower priority number."""
        bisect.insort(self.waiting, sequence, key=lambda queued: queued.request.priority)

    def has_work(self) -> bool:
        """Whether the next plan would have work: a sequence can compute, or can be admitted."""
        can_admit = self._next() is not None and self.slots.used < self.slots.total
        return can_admit or any(sequence.may_compute for sequence in self.running)

    def plan(self, now: float) -> StepPlan:
        """Admit what fits and choose the work of the next step."""
        self._step += 1
        self._planned_at, self._reserved_elements = now, 0
        self._admit(now)
        decode = tuple(s for s in self.running if s.state is State.DECODE)
        cooldown = bool(decode) and now < self._output_cooldown_until
        return StepPlan(
            prefill=tuple(self._prefill_chunks(cooldown)),
            decode=decode,
            drafts=self._drafts(decode) if self.config.speculate == "ngram" else {},
        )

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it was doing. Its slot is free for the next step."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            assert sequence.slot is not None
            if self._share_decoded and sequence.state is State.DECODE:
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
        if self._reserved_elements >= LARGE_OUTPUT:
            self._output_cooldown_until = now + OUTPUT_COOLDOWN * (now - self._planned_at)
        self.slots.set_contents(sequence.slot, _whole_blocks(sequence.tokens[: chunk.end]))
        if chunk.completes_prompt:
            sequence.state = State.DECODE
            sequence.prefilled = now
            if self.config.speculate == "ngram" and sequence.matcher is None:
                sequence.drafter = Drafter(sequence.tokens)

    def check_integrity(self) -> None:
        """Every slot has one owner or none, and no sequence runs without one (for tests)."""
        slots = [sequence.slot for sequence in self.running]
        assert len(slots) == len(set(slots)), f"a slot is shared: {slots}"
        assert set(slots) == self.slots.owned(), f"{slots} in use, {self.slots.owned()} owned"
        assert all(s.state in (State.PREFILL, State.DECODE) for s in self.running)
        assert all(s.state is State.WAITING and s.slot is None for s in self.waiting)

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

    def _admit(self, now: float) -> None:
        while self.slots.used < self.slots.total and (sequence := self._next()) is not None:
            source, length = self._shared_prefix(sequence)
            if self._sibling_computes_more(sequence, length):
                return
            slot = self.slots.acquire(self._step, preferred=source if length else None)
            assert slot is not None
            self.waiting.remove(sequence)
            sequence.group.started = True
            sequence.slot = slot
            sequence.state = State.PREFILL
            sequence.admitted = now
            self.running.append(sequence)

    def _next(self) -> Sequence | None:
        """The sequence to be admitted next."""
        return next((s for s in self.waiting if s.group.started or not self.only_started), None)

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
        return self.config.prefix_reuse and sequence.request.prefix_reuse

    def _prefill_chunks(self, cooldown: bool) -> list[PrefillChunk]:
        """The prompts of the step, in order of admission, within `prefill_chunk` positions."""
        chunks = []
        budget = self.config.prefill_chunk
        for sequence in self.running:
            if sequence.state is State.PREFILL and sequence.may_compute and budget:
                chunk = self._chunk(sequence, budget, cooldown)
                if chunk is not None:
                    self._reserve(chunk)
                    budget -= -(-(chunk.end - chunk.start) // BLOCK) * BLOCK
                    chunks.append(chunk)
        return chunks

    def _chunk(self, sequence: Sequence, budget: int, cooldown: bool) -> PrefillChunk | None:
        """The next positions of a prompt; None where its outputs do not fit into this step. Changes
        nothing: `_reserve` does."""
        # 1) It begins after what is computed, or after a prefix that another slot has.
        copy_from, start = None, sequence.computed
        if start == 0:
            source, start = self._shared_prefix(sequence)
            copy_from = source if start else None
        # 2) It ends with the budget of positions or with the prompt,
        end = min(start + budget, sequence.prompt_length)
        # 3) or earlier, where its outputs would have too many elements.
        request = sequence.outputs
        if request is not None:
            affordable = affordable_end(
                request.positions,
                start,
                end,
                elements_each=self._position_elements(request),
                elements_left=self.output_elements - self._reserved_elements,
                must_progress=self._reserved_elements == 0,
            )
            if affordable is None:
                return None
            end = affordable
            if cooldown and self._elements(request, start, end) >= LARGE_OUTPUT:
                return None
        return PrefillChunk(sequence, start, end, copy_from)

    def _reserve(self, chunk: PrefillChunk) -> None:
        """Charge a chunk's outputs to the step; before a prompt's first chunk, declare that its
        slot holds the copied prefix."""
        sequence = chunk.sequence
        if sequence.outputs is not None:
            self._reserved_elements += self._elements(sequence.outputs, chunk.start, chunk.end)
        if sequence.computed == 0:
            assert sequence.slot is not None
            sequence.computed = sequence.cached = chunk.start
            # Chunks run in the order planned here: from now on the slot holds the prefix alone.
            self.slots.set_contents(sequence.slot, sequence.tokens[: chunk.start])

    def _elements(self, request: OutputsRequest, start: int, end: int) -> int:
        """Elements of a request's outputs at positions [start, end)."""
        count = _count_between(request.positions, start, end)
        return count * self._position_elements(request)


def affordable_end(
    positions: tuple[int, ...],
    start: int,
    end: int,
    *,
    elements_each: int,
    elements_left: int,
    must_progress: bool,
) -> int | None:
    """Where a chunk that could be [start, end) ends so that its outputs, `elements_each` at each of
    some `positions`, fit into `elements_left`: whole blocks from `start`. None where not even one
    block fits, unless it must make progress: a step's only outputs may be one block that is too
    large, or they could never be computed."""
    affordable = max(0, elements_left) // elements_each
    if _count_between(positions, start, end) <= affordable:
        return end
    first_too_many = positions[bisect.bisect_left(positions, start) + affordable]
    shorter = first_too_many // BLOCK * BLOCK
    if shorter > start:
        return shorter
    return min(start + BLOCK, end) if must_progress else None


def _count_between(positions: tuple[int, ...], start: int, end: int) -> int:
    """How many of ascending positions are in [start, end)."""
    return bisect.bisect_left(positions, end) - bisect.bisect_left(positions, start)


def _whole_blocks(token_ids: list[int]) -> list[int]:
    return token_ids[: len(token_ids) - len(token_ids) % BLOCK]
