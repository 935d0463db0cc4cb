"""Budget: limits the prompt positions of a step while sequences decode, using measured costs.

The next token of every stream waits for the whole step. `target_gap` limits the time of a step; it
is in seconds, or a multiple of the time of a decode step. The time that remains after decoding goes
to prompts, which get at least one whole block of positions. But short chunks are slow: each adds a
decode step and multiplies few rows. If prompts then arrive faster than they are computed, the queue
grows and all requests are delayed. So a chunk is never so short that a prompt takes more than
MOST_DELAY times as long as in chunks of the maximum length.

`target_ttft` is the time within which a first token should arrive, not counting the time of its own
prompt. If waiting prompts would miss it, steps become longer in proportion to the delay, up to
STRETCH times the gap. The limit is higher while the waiting sequences outnumber the decoding ones.
Otherwise a few streams with short steps would keep many prompts waiting.

The cost of decoding is the median time of NEAREST recent steps that decoded similar numbers of
rows. The cost of a unit of work is the median over the chunks of the last WINDOW steps with chunks.
So a single slow step changes neither. A step computes its chunks in one pass, whose work is the
number of blocks in the chunks plus PASS_WORK. If one pass computed both the chunks and the decode
rows, the cost of the chunks is the time by which the pass exceeded a step that only decodes. After
PROBE such steps, a step without prompts measures the decode time again. A wrong cost changes the
duration of steps, but never the bits of a result (`model/inference/kernels/README.md`).

The budget reads no clock and handles no sequences; its callers pass seconds and lengths. These
costs do not include outputs, because the scheduler limits the number of their elements
(`scheduler.py`).
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from logitd.model.inference.options import DecodeSteps, TargetGap
from logitd.model.transformer.config import BLOCK

WINDOW = 9
"""The cost of a unit of work is the median over the chunks of this many recent steps."""
NEAREST = 3
"""The cost of decoding is the median time of this many steps: among the last RECENT decode steps,
the ones with the closest row counts."""
RECENT = 32
PROBE = 16
"""After this many steps with shared passes, one step only decodes. It measures the cost of
decoding, which changes with the number of rows and which a shared pass does not show."""
PASS_WORK = 0.5
"""Fixed cost of a pass, in blocks: each pass reads the weights once, and products of few rows are
slower. The value is an assumption; the measured cost of a block compensates for most of its
error."""
MOST_DELAY = 1.75
"""Maximum time that a prompt may take, relative to the time that it would take in chunks of the
maximum length. Chosen by simulation, not measured: a lower value lengthens gaps beyond the target,
and a higher value delays prompts too much."""
UNNOTICED = 0.04
"""Minimum gap, in seconds, if the target is given in decode steps. A decode step of a small model
takes about a millisecond. Chunks as short as a few such steps would delay prompts, to save time
that no reader notices."""
STRETCH = 3.0
"""Maximum time of a step, relative to the target gap, while prompts are late. The limit is higher
if there are more waiting prompts than decoding sequences."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that can be computed: the number of positions left, and its age, which is the time
    since its request arrived. The age is None if no client waits for a first token."""

    positions: int
    age: float | None


class PrefillBudget:
    """The costs of recent steps, and the positions that the next step may compute."""

    def __init__(self, target: TargetGap | None, target_ttft: float | None, chunk: int) -> None:
        self._target = target
        self._target_ttft = target_ttft
        self._chunk = chunk
        self._decoded: deque[tuple[int, float]] = deque(maxlen=RECENT)  # newest first
        self._work_seconds: deque[float] = deque(maxlen=WINDOW)  # prompt parts, divided by work
        self._whole = True  # all of `_work_seconds` are from whole blocks
        self._shared_passes = 0  # since a step that only decoded

    def decoded(self, rows: int, seconds: float) -> None:
        """Record the time of a step, not counting its prompts."""
        self._decoded.appendleft((rows, seconds))
        self._shared_passes = 0

    def prefilled(self, lengths: Sequence[int], seconds: float) -> None:
        """Record the time that a step took for chunks of these lengths. Incomplete blocks may cost
        much less than whole blocks, so their times are used only until whole blocks have been
        measured."""
        whole = all(count % BLOCK == 0 for count in lengths)
        if whole and not self._whole:
            self._work_seconds.clear()
        elif self._whole and not whole and self._work_seconds:
            return
        self._whole = whole
        self._work_seconds.append(seconds / _work(lengths))

    def together(self, rows: int, lengths: Sequence[int], seconds: float) -> None:
        """Record the time of a step that computed its chunks and its decode rows in one pass."""
        self._shared_passes += 1
        if self._decoded:
            self.prefilled(lengths, max(0.0, seconds - self._decode_seconds(rows)))

    def positions(self, rows: int, waiting: Iterable[Waiting], *, measures: bool = True) -> int:
        """Number of prompt positions that the next step may compute while `rows` sequences decode:
        a whole number of blocks. `waiting` has the prompts in the order in which they are computed.
        Returns 0 if the step should measure the cost of decoding, and `measures` is true."""
        if self._target is None:
            return self._chunk
        if measures and self._shared_passes >= PROBE:
            return 0
        blocks = int(self.work(rows, waiting) - PASS_WORK)
        return max(BLOCK, min(self._chunk, blocks * BLOCK))

    def work(self, rows: int, waiting: Iterable[Waiting] = ()) -> float:
        """The work, in blocks, that fits into the next step; 0 until the costs are known."""
        if self._target is None or not self._decoded or not self._work_seconds:
            return 0.0
        decode, each = self._decode_seconds(rows), statistics.median(self._work_seconds)
        if each <= 0:  # below the resolution of the clock
            return PASS_WORK + self._chunk // BLOCK
        if isinstance(self._target, DecodeSteps):
            limit = max(self._target.count * decode, UNNOTICED)
        else:
            limit = self._target
        limit *= self._stretch(rows, waiting, each)
        return max((limit - decode) / each, self._least_work(decode / each))

    def _stretch(self, rows: int, waiting: Iterable[Waiting], each: float) -> float:
        """Factor by which a step may exceed the gap: the longest expected delay of a first token,
        relative to its target. `each` is the time of a unit of work."""
        if self._target_ttft is None:
            return 1.0
        seconds, late, count = 0.0, 1.0, 0
        for prompt in waiting:
            own = each * _work([prompt.positions])
            seconds += own
            if prompt.age is not None:
                count += 1
                late = max(late, (prompt.age + seconds) / (self._target_ttft + own))
        return min(late, STRETCH * max(1.0, count / rows))

    def _decode_seconds(self, rows: int) -> float:
        """Time of a decode step of this many rows. At least one step must have been recorded."""
        near = sorted(self._decoded, key=lambda step: abs(step[0] - rows))[:NEAREST]
        return statistics.median(seconds for _, seconds in near)

    def _least_work(self, decode: float) -> float:
        """Work of the shortest chunk that delays a prompt by at most a factor of MOST_DELAY. A
        decode step costs as much as `decode` blocks."""
        overhead = decode + PASS_WORK
        in_whole_chunks = 1 + overhead / (self._chunk // BLOCK)  # cost of each block
        # A block of a chunk of n costs 1 + overhead / n.
        blocks = overhead / (MOST_DELAY * in_whole_chunks - 1)
        return PASS_WORK + math.ceil(blocks)


def _work(lengths: Sequence[int]) -> float:
    """Work of one pass over chunks, in blocks. An incomplete block counts as a whole one."""
    return PASS_WORK + sum(-(-count // BLOCK) for count in lengths)
