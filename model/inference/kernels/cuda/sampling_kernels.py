"""Triton kernels that choose a token for each row of logits.

`survey` reads the logits once, in blocks. From its results `choose` finds the block that holds a
row's token, and reads only that block again. Greedy rows need neither sums nor the second read. The
parameters are packed by `sample.py`, and `forward.py` launches both.

Shapes: R rows, V vocabulary, B blocks of a row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def survey(
    best,  # (R, B) float32: the largest logit of each block
    best_ids,  # (R, B) int64
    sums,  # (R, B) float64: exponentials relative to the largest
    sound,  # (R, B) int64: 1 if all numbers are usable
    logits,  # (R, V) float32
    computed,  # (R, V) float32
    how,  # (R, ...) int64, STRIDE from row to row
    divisors,  # `how` as float64
    largest,
    V: tl.constexpr,
    B: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    LINKED: tl.constexpr,
):
    """Summarize one block of a row's logits for `choose`."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    if LINKED:
        gdc_launch_dependents()
        gdc_wait()
    raw = tl.load(computed + row.to(tl.int64) * V + column, mask=inside, other=0.0)
    x = tl.load(logits + row.to(tl.int64) * V + column, mask=inside, other=float("-inf"))
    most = tl.max(x)
    first = tl.min(tl.where(x == most, column, V))
    usable = tl.min((tl.abs(raw) <= largest).to(tl.int32))  # false for NaN too
    at = row * B + block
    tl.store(best + at, most)
    tl.store(best_ids + at, first.to(tl.int64))
    tl.store(sound + at, usable.to(tl.int64))
    if tl.load(how + row * STRIDE) == 0:
        divisor = tl.load(divisors + row * STRIDE + 1).to(tl.float32)
        weights = tl.exp((x / divisor - most / divisor).to(tl.float64))
        weights = tl.where(x > float("-inf"), weights, 0.0)
        tl.store(sums + at, tl.sum(weights))


@triton.jit
def choose(
    out,  # (R,) int64
    best,
    best_ids,
    sums,
    sound,
    logits,
    how,
    divisors,
    V: tl.constexpr,
    B: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    LINKED: tl.constexpr,
):
    """A row's token: the likeliest, or the first whose running sum exceeds the row's random
    number."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    inside = block < B
    if LINKED:
        gdc_launch_dependents()
        gdc_wait()
    tops = tl.load(best + row * B + block, mask=inside, other=float("-inf"))
    usable = tl.min(tl.load(sound + row * B + block, mask=inside, other=1))
    most = tl.max(tops)
    holder = tl.min(tl.where(tops == most, block, BLOCKS))
    holder = tl.minimum(holder, B - 1)
    token = tl.load(best_ids + row * B + holder)
    if tl.load(how + row * STRIDE) == 0:
        divisor = tl.load(divisors + row * STRIDE + 1).to(tl.float32)
        uniform = tl.load(divisors + row * STRIDE + 5)
        top = most / divisor
        weights = tl.load(sums + row * B + block, mask=inside, other=0.0)
        weights *= tl.exp((tops / divisor - top).to(tl.float64))
        running = tl.cumsum(weights)
        total = tl.sum(tl.where(block == B - 1, running, 0.0))
        wanted = uniform * total
        # Rounding up may make `wanted` equal to the total: then the token is the last id of any
        # weight.
        reached = (running > wanted) | (running >= total)
        found = tl.min(tl.where(reached & (weights > 0), block, BLOCKS))
        found = tl.minimum(found, B - 1)
        before = tl.sum(tl.where(block == found, running - weights, 0.0))
        column = found * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * V + column, mask=column < V, other=float("-inf"))
        weights = tl.exp((x / divisor - top).to(tl.float64))
        weights = tl.where(x > float("-inf"), weights, 0.0)
        sums_in = before + tl.cumsum(weights)
        last = tl.max(tl.where(weights > 0, column, 0))
        token = tl.min(tl.where((sums_in > wanted) & (weights > 0), column, last)).to(tl.int64)
    tl.store(out + row, tl.where(usable == 1, token, NO_TOKEN))
