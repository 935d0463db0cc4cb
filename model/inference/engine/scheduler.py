"""Scheduler: which sequences the next step computes.

First come, first served, within a priority. A step prefills at most `prefill_chunk` positions,
shared by as many prompts as fit, and decodes every running sequence once; so a long prompt delays
a running sequence by one chunk at most, and never starves it. What was admitted can always finish:
there is no preemption. Knows tokens and slots, not tensors.

Rows that are handed out have a price of their own, in numbers (`price.py`): a step computes
ROWS_BUDGET of them at most, and after a step that computed many, sequences that decode have the
engine to themselves for REST times as long as that step took. So a large reply takes a bounded part
of the memory, and, what it costs besides included, about doubles the time between their tokens at
most.

Where drafts are on, a decode step also gets the tokens that are guessed to follow (`draft.py`), as
long as it has few rows. A sequence with a constraint has none: what it allows somewhere depends on
every token before.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from model.inference.engine.config import EngineConfig
from model.inference.engine.ngram import Draft, Drafter, shares
from model.inference.engine.requests import OutputsRequest
from model.inference.engine.sequence import Sequence, State
from model.inference.engine.slots import SlotPool
from model.inference.options import DRAFTED_ROWS
from model.transformer.config import BLOCK

ROWS_BUDGET = 2**21
"""Numbers of rows in one step; a single block of positions may have more."""
MANY_ROWS = 2**20
"""A step with as many numbers is followed by a rest for the sake of those who decode."""
REST = 2
"""By itself that makes the time between two tokens at most 1 + 1 / REST times as long; the writing
of a reply takes from the same processors."""


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

    `row_width` says how many numbers a request's row at one position is; `share_decoded`, whether
    what a sequence generated can be shared like its prompt.
    """

    def __init__(
        self,
        config: EngineConfig,
        row_width: Callable[[OutputsRequest], int],
        *,
        share_decoded: bool = False,
    ) -> None:
        self.config = config
        self._share_decoded = share_decoded
        self.rows_budget = ROWS_BUDGET
        self._row_width = row_width
        self.slots = SlotPool(config.slots)
        self.waiting: list[Sequence] = []  # in order of admission to come
        self.running: list[Sequence] = []  # in order of admission
        self.only_started = False
        """While set, nobody is admitted but siblings of those who were: the weights are about to
        change, and a request is answered by one set of weights."""
        self._step = 0
        self._planned_at = 0.0
        self._planned_numbers = 0  # of rows, in the present step
        self._rows_rest_until = 0.0

    def enqueue(self, sequence: Sequence) -> None:
        """Queue behind all of the same or a lower priority number."""
        bisect.insort(self.waiting, sequence, key=lambda queued: queued.request.priority)

    def has_work(self) -> bool:
        """Whether the next plan would hold anything: somebody can compute, or can be admitted."""
        can_admit = self._next() is not None and self.slots.used < self.slots.total
        return can_admit or any(sequence.may_compute for sequence in self.running)

    def plan(self, now: float) -> StepPlan:
        """Admit what fits and choose the work of the next step."""
        self._step += 1
        self._planned_at, self._planned_numbers = now, 0
        self._admit(now)
        decode = tuple(s for s in self.running if s.state is State.DECODE)
        rows_rest = bool(decode) and now < self._rows_rest_until
        return StepPlan(
            prefill=tuple(self._prefill_chunks(rows_rest)),
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
                self.slots.keep(sequence.slot, _whole_blocks(sequence.tokens[: sequence.computed]))
            self.slots.release(sequence.slot, self._step)
            sequence.slot = None
        sequence.state = State.FINISHED

    def prefilled(self, chunk: PrefillChunk, now: float) -> None:
        """Book a computed chunk; its whole blocks can be shared from now on."""
        sequence = chunk.sequence
        assert sequence.slot is not None
        sequence.computed = chunk.end
        if self._planned_numbers >= MANY_ROWS:
            self._rows_rest_until = now + REST * (now - self._planned_at)
        self.slots.keep(sequence.slot, _whole_blocks(sequence.tokens[: chunk.end]))
        if chunk.completes_prompt:
            sequence.state = State.DECODE
            sequence.prefilled = now
            if self.config.speculate == "ngram" and sequence.matcher is None:
                sequence.drafter = Drafter(sequence.tokens)

    def check_integrity(self) -> None:
        """Every slot has one owner or none, and nobody runs without one (for tests)."""
        held = [sequence.slot for sequence in self.running]
        assert len(held) == len(set(held)), f"a slot is shared: {held}"
        assert set(held) == self.slots.owned(), f"{held} held, {self.slots.owned()} owned"
        assert all(s.state in (State.PREFILL, State.DECODE) for s in self.running)
        assert all(s.state is State.WAITING and s.slot is None for s in self.waiting)

    def _drafts(self, decode: tuple[Sequence, ...]) -> dict[Sequence, Draft]:
        """What is guessed to follow those who decode, within the rows that a step may have. The
        last token that one may generate needs no row behind it."""
        room = DRAFTED_ROWS - len(decode)
        if room <= 0:
            return {}
        drafts: dict[Sequence, Draft] = {}
        for sequence in decode:
            drafter = sequence.drafter
            if drafter is not None and (draft := drafter.guess(room, len(decode))) is not None:
                del draft.token_ids[sequence.tokens_left - 1 :]
                drafts[sequence] = draft
        if not drafts:
            return drafts
        counts = shares([len(draft.token_ids) for draft in drafts.values()], room)
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
        """Whether one of the same prompt is still computing blocks that this one will then copy,
        more than the `length` there now. Nothing is lost by waiting: prompts are computed in this
        order anyway."""
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

    def _prefill_chunks(self, rows_rest: bool) -> list[PrefillChunk]:
        chunks = []
        budget = self.config.prefill_chunk
        for sequence in self.running:
            if sequence.state is State.PREFILL and sequence.may_compute and budget:
                chunk = self._chunk(sequence, budget, rows_rest)
                if chunk is not None:
                    budget -= -(-(chunk.end - chunk.start) // BLOCK) * BLOCK
                    chunks.append(chunk)
        return chunks

    def _chunk(self, sequence: Sequence, budget: int, rows_rest: bool) -> PrefillChunk | None:
        """The next positions of a prompt; None where its rows have no place in this step."""
        copy_from, start = None, sequence.computed
        if start == 0:
            source, start = self._shared_prefix(sequence)
            copy_from = source if start else None
        end = min(start + budget, sequence.prompt_length)
        if sequence.rows is not None:
            end = self._book_rows(sequence.rows, start, end, rows_rest)
            if end == start:
                return None
        if sequence.computed == 0:
            assert sequence.slot is not None
            sequence.computed = sequence.cached = start
            # Chunks run in the order planned here: from now on the row holds the prefix alone.
            self.slots.keep(sequence.slot, sequence.tokens[:start])
        return PrefillChunk(sequence, start, end, copy_from)

    def _book_rows(self, request: OutputsRequest, start: int, end: int, rest: bool) -> int:
        """Where a chunk that begins at `start` ends so that the rows in it can be afforded, whole
        blocks from `start`, and count these. `start` itself when none can."""
        width, positions, request_end = self._row_width(request), request.positions, end
        first, behind = bisect.bisect_left(positions, start), bisect.bisect_left(positions, end)
        affordable = max(0, self.rows_budget - self._planned_numbers) // width
        if behind - first > affordable:
            end = positions[first + affordable] // BLOCK * BLOCK
            if end <= start:
                if self._planned_numbers:
                    return start
                end = min(start + BLOCK, request_end)  # a step's only rows may be dearer
            behind = bisect.bisect_left(positions, end)
        numbers = (behind - first) * width
        if rest and numbers >= MANY_ROWS:
            return start
        self._planned_numbers += numbers
        return end


def _whole_blocks(token_ids: list[int]) -> list[int]:
    return token_ids[: len(token_ids) - len(token_ids) % BLOCK]
