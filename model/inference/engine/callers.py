"""Callers: rules that share slots and steps between callers.

A caller should not hold all slots for long, because running sequences are never preempted:

- A caller leaves an eighth of the slots free if another caller sent a request in the last
  COMPANY_SECONDS.
- A caller runs only as many sequences that generate with interventions as fit into one step. More
  of them would only occupy slots and wait.
- A sequence waits while another sequence of its request computes a prefix that it can copy, or
  scores their prompt.

In each step, callers take turns to have their prompts computed. The rules see sequences and slot
counts; the scheduler decides and keeps all other state.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence as Many

from logitd.model.inference.engine.sequence import Sequence, State
from logitd.model.transformer.config import BLOCK

COMPANY_SECONDS = 3600
"""For this many seconds after a caller's request, other callers leave slots free for that
caller."""
SPARE_DIVISOR = 8
"""The number of slots that a caller leaves free is the total number of slots divided by this."""


class CallerTurns:
    """Records when each caller last sent a request and last began a prompt."""

    def __init__(self) -> None:
        self._arrivals: OrderedDict[str, float] = OrderedDict()  # the last two callers
        self._began: dict[str, int] = {}  # by caller: last step that began one of its prompts

    def arrived(self, sequence: Sequence) -> None:
        """Record that a caller sent a request, and its time of arrival."""
        self._arrivals[sequence.request.caller] = sequence.arrived
        self._arrivals.move_to_end(sequence.request.caller)
        if len(self._arrivals) > 2:  # the last caller other than any given one is among two
            self._arrivals.popitem(last=False)

    def began(self, sequence: Sequence, step: int, running: Many[Sequence]) -> None:
        """Record that `step` computes the first chunk of a prompt."""
        self._began[sequence.request.caller] = step
        if len(self._began) > len(running):  # some callers have nothing running any more
            callers = {sequence.request.caller for sequence in running}
            self._began = {name: last for name, last in self._began.items() if name in callers}

    def leaves_slots(
        self, sequence: Sequence, running: Many[Sequence], slots: int, now: float
    ) -> bool:
        """False if this sequence would take a slot that its caller leaves to others. Slots of
        sequences whose readers are behind count as free, because these sequences can be evicted."""
        spare, caller = slots // SPARE_DIVISOR, sequence.request.caller
        others = (at for name, at in reversed(self._arrivals.items()) if name != caller)
        if not spare or next(others, -math.inf) <= now - COMPANY_SECONDS:
            return True
        return sum(s.may_compute and _same_caller(s, sequence) for s in running) < slots - spare

    def in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        """Order prompts for a step. Prompts already begun come first, in order of admission; then
        the first prompt of each caller, the second of each, and so on. The caller whose prompt was
        begun most recently comes last."""
        if len({sequence.request.caller for sequence in prompts}) <= 1:
            return prompts
        places: dict[Sequence, tuple[int, int, bool]] = {}
        counts: Counter[str] = Counter()
        for sequence in prompts:
            caller = sequence.request.caller
            if sequence.computed:
                places[sequence] = (-1, 0, False)
            else:
                began, came = self._began.get(caller, -1), sequence.admitted_step
                places[sequence] = (counts[caller], max(began, came), began >= came)
                counts[caller] += 1
        return sorted(prompts, key=places.__getitem__)


def leaves_rows(sequence: Sequence, running: Many[Sequence], step_elements: int) -> bool:
    """False if this sequence generates with interventions, and its caller already runs as many such
    sequences as fit into one step."""
    same = [s for s in (*running, sequence) if s.changes_rows and _same_caller(s, sequence)]
    elements = sum(s.group.cost.row for s in same)
    return not sequence.changes_rows or len(same) == 1 or elements <= step_elements


def waits_for_sibling(sequence: Sequence, length: int, running: Many[Sequence]) -> bool:
    """True if another sequence of the same request is computing blocks of the same prompt, so that
    this sequence will soon be able to copy more than the `length` positions available now. Also
    true while a sibling scores the prompt, because a prompt's logprobs precede all tokens. Waiting
    costs nothing, because prompts are computed one by one anyway."""
    shareable = sequence.first_needed // BLOCK * BLOCK
    scores = sequence.generation is not None and sequence.generation.prompt_logprobs is not None
    return (length < shareable or scores) and any(
        s.group is sequence.group and s.state is State.PREFILL for s in running
    )


def _same_caller(one: Sequence, other: Sequence) -> bool:
    return one.request.caller == other.request.caller
