"""Budget: limits the prompt positions of a step while sequences decode, using measured costs.

The next token of every stream waits for the whole step. `target_gap` limits the time of a step, in
decode steps or in seconds. The time that decoding leaves is for prompts, in whole blocks, at least
one. But short chunks are slow: each adds a decode step and multiplies few rows. If prompts then
arrive faster than they are computed, all requests wait for them. So a chunk is never so short that
a prompt takes more than MOST_DELAY times as long as in whole chunks.

The cost of decoding is the median of the last WINDOW steps, and the cost of a unit of work the
median of as many prompt parts, so a single slow step changes nothing. A step computes its chunks in
one pass, whose work is their number of blocks plus PASS_WORK. If chunks and decode shared a pass,
the chunks are charged the time beyond a step that only decodes. A wrong cost changes the length of
steps but no bits (`model/inference/kernels/README.md`).

The budget has no clock and knows no sequences: it is given seconds and lengths. Outputs are limited
by their elements (`scheduler.py`) and are not part of these costs.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

from logitd.model.inference.options import DecodeSteps, TargetGap
from logitd.model.transformer.config import BLOCK

WINDOW = 9
"""Number of recent steps in the median."""
PASS_WORK = 0.5
"""Fixed cost of a pass, in blocks: each pass reads the weights once, and products of few rows are
slower. It is an assumption; the measured cost of a block compensates for most of its error."""
MOST_DELAY = 1.75
"""Limit of a prompt's time relative to whole chunks. Chosen by simulation, not measured: a lower
value lengthens gaps beyond the target, a higher one delays prompts too much."""


class PrefillBudget:
    """The costs of recent steps, and the positions that the next step may compute."""

    def __init__(self, target: TargetGap | None, chunk: int) -> None:
        self._target = target
        self._chunk = chunk
        self._decode_seconds: deque[float] = deque(maxlen=WINDOW)
        self._work_seconds: deque[float] = deque(maxlen=WINDOW)  # prompt parts, divided by work
        self._whole = True  # all of `_work_seconds` are from whole blocks

    def decoded(self, seconds: float) -> None:
        """Record the time of a step without its prompts."""
        self._decode_seconds.append(seconds)

    def prefilled(self, lengths: Sequence[int], seconds: float) -> None:
        """Record the time that a step took for chunks of these lengths. Incomplete blocks may cost
        much less than whole ones, so they count only until whole ones have been measured."""
        whole = all(count % BLOCK == 0 for count in lengths)
        if whole and not self._whole:
            self._work_seconds.clear()
        elif self._whole and not whole and self._work_seconds:
            return
        self._whole = whole
        self._work_seconds.append(seconds / _work(lengths))

    def together(self, lengths: Sequence[int], seconds: float) -> None:
        """Record the time of a step that computed its chunks and its decode in one pass."""
        if self._decode_seconds:
            decode = statistics.median(self._decode_seconds)
            self.prefilled(lengths, max(0.0, seconds - decode))

    def positions(self) -> int:
        """Prompt positions of the next step while others decode, in whole blocks."""
        if self._target is None:
            return self._chunk
        blocks = int(self.work(self._target) - PASS_WORK)
        return max(BLOCK, min(self._chunk, blocks * BLOCK))

    def work(self, target: TargetGap) -> float:
        """Work, in blocks, that fits into a gap; 0 until the costs are known."""
        if not self._decode_seconds or not self._work_seconds:
            return 0.0
        decode = statistics.median(self._decode_seconds)
        limit = target.count * decode if isinstance(target, DecodeSteps) else target
        each = statistics.median(self._work_seconds)
        if each <= 0:  # below the resolution of the clock
            return PASS_WORK + self._chunk // BLOCK
        return max((limit - decode) / each, self._least_work(decode / each))

    def _least_work(self, decode: float) -> float:
        """Work of the shortest chunk that delays a prompt by at most MOST_DELAY. A decode step
        costs as much as `decode` blocks."""
        overhead = decode + PASS_WORK
        in_whole_chunks = 1 + overhead / (self._chunk // BLOCK)  # cost of each block
        # A block of a chunk of n costs 1 + overhead / n.
        blocks = overhead / (MOST_DELAY * in_whole_chunks - 1)
        return PASS_WORK + math.ceil(blocks)


def _work(lengths: Sequence[int]) -> float:
    """Work of one pass over chunks, in blocks. An incomplete block counts as a whole one."""
    return PASS_WORK + sum(-(-count // BLOCK) for count in lengths)
