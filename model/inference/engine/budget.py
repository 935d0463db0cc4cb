"""Budget: the prompt positions that a step may compute while others decode, by measured costs.

A stream's next token waits for the whole step. `target_gap` limits the step's time, in decode steps
or in seconds; the time that decoding leaves is for prompts, in whole blocks, one at least. Short
chunks are slow, though: each brings a decode step along, and products of few rows. If prompts
arrive faster than they are computed, everybody waits for them. So a chunk is never so short that a
prompt takes more than MOST_DELAY times as long as in whole chunks.

Costs are medians of the last WINDOW decode parts, and of as many prompt parts divided by their
work: a single slow step changes nothing. The chunks of a step are one pass, whose work is their
blocks plus PASS_WORK. If chunks and decode were one pass, the chunks cost the time beyond a step
that only decodes. A wrong cost changes the length of a step and no bits
(`model/inference/kernels/README.md`).

Knows seconds and blocks, no clock and no sequences. Outputs are limited by their elements
(`scheduler.py`) and are not in these costs.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

from logitd.model.inference.options import DecodeSteps, TargetGap
from logitd.model.transformer.config import BLOCK

WINDOW = 9
"""Number of recent steps that the costs are taken from."""
PASS_WORK = 0.5
"""Cost of a pass in addition to its blocks, in blocks: weights are read once for all blocks, and
fewer rows make slower products. An assumption; the measured cost of a block makes up for most of
its error."""
MOST_DELAY = 1.75
"""Time of a prompt relative to whole chunks, at most. Chosen by simulated costs, not measured: less
lengthens gaps beyond the target, more lets prompts become what everybody waits for."""


class PrefillBudget:
    """The costs of recent steps, and the positions that the next step may compute."""

    def __init__(self, target: TargetGap | None, chunk: int) -> None:
        self._target = target
        self._chunk = chunk
        self._decode_seconds: deque[float] = deque(maxlen=WINDOW)
        self._work_seconds: deque[float] = deque(maxlen=WINDOW)  # prompt parts, divided by work
        self._whole = True  # the latter are of whole blocks

    def decoded(self, seconds: float) -> None:
        """Note the time of a step without its prompts."""
        self._decode_seconds.append(seconds)

    def prefilled(self, lengths: Sequence[int], seconds: float) -> None:
        """Note the time of a step's chunks of these lengths. Incomplete blocks may cost much less
        than whole ones, so they count only until whole ones were measured."""
        whole = all(count % BLOCK == 0 for count in lengths)
        if whole and not self._whole:
            self._work_seconds.clear()
        elif self._whole and not whole and self._work_seconds:
            return
        self._whole = whole
        self._work_seconds.append(seconds / _work(lengths))

    def together(self, lengths: Sequence[int], seconds: float) -> None:
        """Note the time of a step whose chunks and decode were one pass."""
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
        """Work of the shortest chunk that delays a prompt by MOST_DELAY, if a decode step costs
        `decode` blocks."""
        overhead = decode + PASS_WORK
        in_whole_chunks = 1 + overhead / (self._chunk // BLOCK)  # cost of each block
        # A block of a chunk of n costs 1 + overhead / n.
        blocks = overhead / (MOST_DELAY * in_whole_chunks - 1)
        return PASS_WORK + math.ceil(blocks)


def _work(lengths: Sequence[int]) -> float:
    """Work of one pass over chunks, in blocks. An incomplete block counts as a whole one."""
    return PASS_WORK + sum(-(-count // BLOCK) for count in lengths)
