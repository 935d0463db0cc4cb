"""Budget: how much of prompts a step may compute while others decode, by what steps have cost.

A stream's next token waits for the whole step, prompts included. So what a step may hold of them
follows from a time: `target_gap`, so many times a decode step, or seconds. What is left of it after
decoding is for prompts, in whole blocks, one at least. But short chunks are slow: each brings a
decode step along, and products of few rows. Where prompts come faster than they are computed, all
wait for that, and few decode. So a chunk is never so short that a prompt would take more than
MOST_DELAY times as long as in whole chunks, whatever the target is. Where nobody decodes nobody
waits, and there is no budget.

The cost of what a step may do next is taken from what the last steps took: the median of WINDOW
decode parts, and of WINDOW prompt parts divided by their work. A median, because one step in which
another process had the cores says nothing about the next. The chunks of a step are one pass, whose
work is their blocks and PASS_WORK for the pass as such. Where blocks come to cost more, as later
positions do, the median follows within a few steps, and in the meantime no more can be wrong than
the length of a step: no bit depends on where a prompt is divided
(`model/inference/kernels/README.md`). Where chunks and what is decoded are one pass, the chunks
cost what it takes longer than a step that only decodes.

Knows seconds and blocks; no clock, and no sequences. Outputs are limited by their elements
(`scheduler.py`), and what they take is not in these costs.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from logitd.model.inference.options import DecodeSteps, TargetGap
from logitd.model.transformer.config import BLOCK

WINDOW = 9
"""Steps that the costs are taken from."""
PASS_WORK = 0.5
"""What a pass costs besides its blocks, in blocks: weights are read once for all of them, and fewer
rows make slower products. An assumption: where it is wrong, the cost of a block
that is learnt from the chunks in use makes up for most of it."""
MOST_DELAY = 1.75
"""How many times as long a prompt may take as in chunks of the usual length. Chosen by simulated
costs, not measured: less lengthens gaps beyond the target, more lets prompts become what all wait
for."""


@dataclass(frozen=True, slots=True)
class ChunkLengths:
    """Positions of each chunk of a step, and their work."""

    positions: Sequence[int]

    @property
    def work(self) -> float:
        """In blocks. One that is begun counts as a whole one."""
        return PASS_WORK + sum(-(-count // BLOCK) for count in self.positions)

    @property
    def whole_blocks(self) -> bool:
        """Whether no block is merely begun: such a block may cost as much as any, or less."""
        return all(count % BLOCK == 0 for count in self.positions)


class PrefillBudget:
    """The costs of steps, and the work that the next one may have."""

    def __init__(self, target: TargetGap, chunk: int) -> None:
        """`chunk`: positions of a step where nobody decodes."""
        self._target = target
        self._chunk_blocks = chunk // BLOCK
        self._decode_seconds: deque[float] = deque(maxlen=WINDOW)  # of decode parts
        self._work_seconds: deque[float] = deque(maxlen=WINDOW)  # of prompt parts, by their work
        self._exact = True  # whether the latter are of whole blocks

    def decoded(self, seconds: float) -> None:
        """A step's decode has taken so long, with all that a step does besides."""
        self._decode_seconds.append(seconds)

    def prefilled(self, chunks: ChunkLengths, seconds: float) -> None:
        """A step's chunks have taken so long. Those with blocks that are merely begun count only
        where no others have been seen."""
        if chunks.whole_blocks:
            if not self._exact:
                self._work_seconds.clear()
            self._exact = True
        elif self._work_seconds and self._exact:
            return
        else:
            self._exact = False
        self._work_seconds.append(seconds / chunks.work)

    def together(self, chunks: ChunkLengths, seconds: float) -> None:
        """A step's chunks and its decode were one pass, which has taken so long with all besides:
        the chunks cost what it took longer than a step that only decodes."""
        if self._decode_seconds:
            decode = statistics.median(self._decode_seconds)
            self.prefilled(chunks, max(0.0, seconds - decode))

    def work(self) -> float:
        """How much work, as that of chunks, the next step may have while others decode: 0 as long
        as it is not known what that would cost. One block is allowed whatever this is."""
        if not self._decode_seconds or not self._work_seconds:
            return 0.0
        decode = statistics.median(self._decode_seconds)
        target = self._target
        limit = target.count * decode if isinstance(target, DecodeSteps) else target
        each = statistics.median(self._work_seconds)
        if each <= 0:  # less than could be measured
            return PASS_WORK + self._chunk_blocks
        return max((limit - decode) / each, self._least_work(decode / each))

    def _least_work(self, decode: float) -> float:
        """That of the shortest chunk with which a prompt takes MOST_DELAY times as long as with
        whole ones, where a decode step is so much work."""
        besides = decode + PASS_WORK
        in_whole_chunks = 1 + besides / self._chunk_blocks  # of each block
        # A block of a chunk of n costs 1 + besides / n.
        blocks = besides / (MOST_DELAY * in_whole_chunks - 1)
        return PASS_WORK + math.ceil(blocks)


def positions_for(work: float) -> int:
    """The most positions, in whole blocks, that a pass may have of some work. 0 where there is not
    enough for a block."""
    return max(0, int(work - PASS_WORK)) * BLOCK
