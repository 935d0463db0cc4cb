"""Triton kernels of a decode step: embeddings, norms and matrix products. A step needs few
launches. A row's sums do not depend on other rows. `attention_kernels.py` has attention, and
`sampling_kernels.py` sampling.

Every kernel computes in float32 and reads weights, keys and values in the model's dtype. The
residual stream stays in float32. `forward.py` chooses sizes and launches the kernels in order.

Programmatic dependent launch (LINKED): `gdc_launch_dependents` lets the next kernel start as soon
as all programs of the current kernel have called it. The next kernel loads its weights, and then
waits for the results of the current kernel with `gdc_wait`. No kernel writes before this wait.
Several kernels may wait at a time, so each should take few registers. `embed` lets no kernel start
before its wait, so only the kernels of one step overlap.

Chunks: a tuple of tensors (B, CHUNK) that together hold B rows. Each warp holds whole rows, so sums
over a row need no barrier and have the same order in every kernel.

Source: NVIDIA's CUDA programming guide, for programmatic dependent launch.

Shapes: R rows of a step, C = d_model, K and N columns of a product's input and output, S parts of a
product.
"""

# ruff: noqa: RUF005 -- Triton 3.6 does not compile the unpacking of tuples

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from logitd.model.inference.kernels.cuda.sample import FIELDS

ROW = tl.constexpr(4 + FIELDS)
"""Number of integers of an uploaded row: token, slot, position, row of a sampled token, then the
sampling parameters."""
CHUNK = tl.constexpr(128)
"""Number of columns of a chunk, four for each thread of a warp."""
NO_NORM, LAYER_NORM, RMS_NORM = 0, 1, 2
IDENTITY, GELU_TANH, GELU, RELU, RELU2, SWIGLU = range(6)


@triton.jit
def embed(
    out,  # (R, C) float32
    given,  # (R, ROW) int64: token, slot, position, row of `sampled` or -1, ...
    sampled,  # int64: the tokens that the last step sampled
    tokens,  # (V, C)
    positions,  # (L, C) or None
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LINKED: tl.constexpr,
):
    """Embeddings of tokens at their positions. A sampled token is written into `given`; doing so
    twice changes nothing. A row whose token could not be sampled continues with token 0, and its
    results are dropped."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if LINKED:
        # Later kernels read keys that the last step wrote, so they start only now.
        gdc_wait()
        gdc_launch_dependents()
    token = tl.load(given + ROW * row)
    source = tl.load(given + ROW * row + 3)
    last = tl.load(sampled + source, mask=source >= 0, other=0)
    token = tl.where(source < 0, token, tl.maximum(last, 0))
    tl.store(given + ROW * row, token)
    x = tl.load(tokens + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if positions is not None:
        position = tl.load(given + ROW * row + 2)
        x += tl.load(positions + position * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, x, mask=inside)


@triton.jit
def _read(source, at, k, mask, K: tl.constexpr, SPAN: tl.constexpr):
    """Load chunks of SPAN columns. `at` are the offsets of the first chunk's elements in `source`,
    and `k` are their columns. Elements from column K on are 0."""
    chunks = ()
    for start in tl.static_range(0, SPAN, CHUNK):
        inside = mask & (k + start < K)
        chunks = chunks + (tl.load(source + at + start, mask=inside, other=0.0),)
    return chunks


@triton.jit
def _sum(chunks):
    """The sums of rows in chunks: (B, 1)."""
    total = chunks[0]
    for number in tl.static_range(1, len(chunks)):
        total += chunks[number]
    return tl.sum(total, axis=1)[:, None]


@triton.jit
def _normed(rows, weight, bias, k, eps, K: tl.constexpr, NORM: tl.constexpr):
    """Normalize rows of K columns. `rows`, `weight` and `bias` are chunks."""
    if NORM == 1:
        mean = _sum(rows) / K
        centered = ()
        for number in tl.static_range(len(rows)):
            inside = k + number * CHUNK < K
            centered = centered + (tl.where(inside, rows[number] - mean, 0.0),)
        rows = centered
    if NORM != 0:
        squares = ()
        for number in tl.static_range(len(rows)):
            squares = squares + (rows[number] * rows[number],)
        scale = tl.rsqrt(_sum(squares) / K + eps)
        scaled = ()
        for number in tl.static_range(len(rows)):
            y = rows[number] * scale * weight[number].to(tl.float32)
            if len(bias) > 0:
                y += bias[number].to(tl.float32)
            scaled = scaled + (y,)
        rows = scaled
    return rows


@triton.jit
def _activated(x, value, ACTIVATION: tl.constexpr):
    """The activation of x; with SwiGLU, the activation of the gate x times `value`."""
    y = x
    if ACTIVATION == 1:
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1 + tl.exp(-2 * u))
    if ACTIVATION == 2:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == 3:
        y = tl.maximum(x, 0.0)
    if ACTIVATION == 4:
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    if ACTIVATION == 5:
        y = x / (1 + tl.exp(-x)) * value
    return y


@triton.jit
def linear(
    out,  # (R, N)
    x,  # (R, K)
    weight,  # (N, K); with SwiGLU (2 N, K)
    bias,  # (N,) or None
    residual,  # (R, N) float32 or None
    norm_weight,  # (K,) or None
    norm_bias,  # (K,) or None
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINKED: tl.constexpr,
):
    """norm(x) times a matrix, for few rows. Each warp holds COLUMNS rows of the matrix, which it
    loads before it waits, and normalizes x by itself."""
    if LINKED:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N * COLUMNS + tl.arange(0, BLOCK_N)
    k = tl.arange(0, CHUNK)[None, :] + tl.zeros((BLOCK_N, 1), tl.int32)
    matrix, second, gain, shift, added, second_added = (), (), (), (), (), ()
    for number in tl.static_range(COLUMNS):
        column = first + number * BLOCK_N
        kept = column < N
        at = column[:, None].to(tl.int64) * K + k
        matrix = matrix + (_read(weight, at, k, kept[:, None], K, K),)
        if ACTIVATION == 5:
            second = second + (_read(weight + N * K, at, k, kept[:, None], K, K),)
        if bias is not None:
            b = tl.load(bias + column, mask=kept, other=0.0)
            added = added + (b.to(tl.float32),)
            if ACTIVATION == 5:
                b = tl.load(bias + N + column, mask=kept, other=0.0)
                second_added = second_added + (b.to(tl.float32),)
    if norm_weight is not None:
        gain = _read(norm_weight, k, k, True, K, K)
    if norm_bias is not None:
        shift = _read(norm_bias, k, k, True, K, K)
    if LINKED:
        gdc_wait()
    for row in tl.static_range(ROWS):
        onto = ()
        if residual is not None:
            for number in tl.static_range(COLUMNS):
                column = first + number * BLOCK_N
                r = tl.load(residual + row * N + column, mask=column < N, other=0.0)
                onto = onto + (r,)
        h = _normed(_read(x + row * K, k, k, True, K, K), gain, shift, k, eps, K, NORM)
        for number in tl.static_range(COLUMNS):
            column = first + number * BLOCK_N
            y = _dot(matrix[number], h)
            value = y
            if ACTIVATION == 5:
                value = _dot(second[number], h)
            if bias is not None:
                y += added[number]
                if ACTIVATION == 5:
                    value += second_added[number]
            y = _activated(y, value, ACTIVATION)
            if residual is not None:
                y += onto[number]
            tl.store(out + row * N + column, y.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _dot(matrix, x):
    """Products (B,) of rows of a matrix and x, both in chunks."""
    y = matrix[0].to(tl.float32) * x[0].to(tl.float32)
    for number in tl.static_range(1, len(x)):
        y += matrix[number].to(tl.float32) * x[number].to(tl.float32)
    return tl.sum(y, axis=1)


@triton.jit
def _joined(rows, parts, bias, at, k, mask, size, K: tl.constexpr, S: tl.constexpr):
    """Add a product in `parts` (S, R, K) and its bias to rows. Rows and bias are chunks."""
    joined = ()
    for number in tl.static_range(len(rows)):
        inside = mask & (k + number * CHUNK < K)
        h = rows[number].to(tl.float32)
        for part in tl.static_range(S):
            h += tl.load(parts + part * size + at + number * CHUNK, mask=inside, other=0.0)
        if len(bias) > 0:
            h += bias[number].to(tl.float32)
        joined = joined + (h,)
    return joined


@triton.jit
def product(
    out,  # (R, N); with PARTS (S, R, N) float32: sums over SPAN columns of x each
    x,  # (R, K)
    parts,  # (S, R, K) float32 or None: a product in parts to add to x first
    parts_bias,  # (K,) or None: the bias of that product
    stream,  # (R, K) float32 or None: x after the addition
    weight,  # (N, K); with SwiGLU (2 N, K)
    bias,  # (N,) or None
    residual,  # (R, N) float32 or None
    norm_weight,  # (K,) or None
    norm_bias,  # (K,) or None
    eps,
    zero,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    S: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINKED: tl.constexpr,
):
    """norm(x) times a matrix in one tile of up to ROWS rows, with the same sums as `norm` and
    `matmul`. Each program loads its weights before it waits. Each warp normalizes a row.

    `zero` is 0.0. If it were a constant, the compiler could merge the sums of the two halves of x.
    """
    if LINKED:
        gdc_launch_dependents()
    part = tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, ROWS)
    live, kept = (r < rows)[:, None], n < N
    kn = tl.arange(0, CHUNK)[None, :] + tl.zeros((BLOCK_N, 1), tl.int32)
    k = tl.arange(0, CHUNK)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    left: tl.constexpr = SPAN if SPAN < K else K
    at = n[:, None].to(tl.int64) * K + kn + part * SPAN
    b = _read(weight, at, kn + part * SPAN, kept[:, None], K, left)
    second, gain, shift, earlier = (), (), (), ()
    if ACTIVATION == 5:
        second = _read(weight + N * K, at, kn + part * SPAN, kept[:, None], K, left)
    if norm_weight is not None:
        gain = _read(norm_weight, k, k, True, K, K)
    if norm_bias is not None:
        shift = _read(norm_bias, k, k, True, K, K)
    if parts_bias is not None:
        earlier = _read(parts_bias, k, k, True, K, K)
    added, second_added = 0.0, 0.0
    if bias is not None:
        added = tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == 5:
            second_added = tl.load(bias + N + n, mask=kept, other=0.0).to(tl.float32)[None, :]
    to = m[:, None] * N + n[None, :]
    mask = (m < rows)[:, None] & kept[None, :]
    if PARTS:
        to += part * rows * N
    if LINKED:
        gdc_wait()
    onto = 0.0
    if residual is not None:
        onto = tl.load(residual + to, mask=mask, other=0.0)
    row = r[:, None] * K + k + part * SPAN
    a = _read(x, row, k + part * SPAN, live, K, left)
    if parts is not None:
        a = _joined(a, parts, earlier, row, k, live, rows * K, K, S)
        for number in tl.static_range(len(a)):
            inside = live & (k + number * CHUNK < K) & (tl.program_id(0) == 0)
            tl.store(stream + row + number * CHUNK, a[number], mask=inside)
    a = _normed(a, gain, shift, k, eps, K, NORM)
    half: tl.constexpr = (len(a) + 1) // 2
    y = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    z = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    value = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    other = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    for number in tl.static_range(half):
        h = _repeated(a[number].to(weight.dtype.element_ty), BLOCK_M, ROWS)
        y = tl.dot(h, b[number].T, y, input_precision="ieee")
        if ACTIVATION == 5:
            value = tl.dot(h, second[number].T, value, input_precision="ieee")
        if half + number < len(a):
            h = _repeated(a[half + number].to(weight.dtype.element_ty), BLOCK_M, ROWS)
            z = tl.dot(h, b[half + number].T, z, input_precision="ieee")
            if ACTIVATION == 5:
                other = tl.dot(h, second[half + number].T, other, input_precision="ieee")
    y = _activated(y + z + added, value + other + second_added, ACTIVATION) + onto
    tl.store(out + to, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _repeated(x, BLOCK_M: tl.constexpr, ROWS: tl.constexpr):
    """Rows (ROWS, B), repeated to fill a tile of BLOCK_M rows."""
    if BLOCK_M == ROWS:
        return x
    x = tl.broadcast_to(x[None, :, :], (BLOCK_M // ROWS, ROWS, CHUNK))
    return tl.reshape(x, (BLOCK_M, CHUNK))


@triton.jit
def _fetch(weight, n, start, N: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr):
    """Prefetch rows `n` of a matrix into the second-level cache: SPAN columns from `start`, in
    lines of 64 elements."""
    LINES: tl.constexpr = 64
    k = start + LINES * tl.arange(0, triton.next_power_of_2(SPAN) // LINES)
    at = tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + tl.minimum(k, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(weight + at).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def matmul(
    out,  # (R, N); with PARTS (S, R, N) float32: sums over SPAN columns of x each
    x,  # (R, K)
    weight,  # (N, K); with SwiGLU (2 N, K)
    bias,  # (N,) or None
    residual,  # (R, N) float32 or None
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINKED: tl.constexpr,
):
    """Multiply x by a matrix, in tiles. With PARTS, each part is a sum over SPAN columns of x;
    `norm` or `product` later adds the parts, the bias and the residual.

    The two halves of the columns of x have separate sums, because each addition to a sum waits for
    the one before it."""
    if LINKED:
        gdc_launch_dependents()
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    HALF: tl.constexpr = (SPAN + 2 * CHUNK - 1) // (2 * CHUNK) * CHUNK
    k = part * SPAN + tl.arange(0, BLOCK_K)
    live, kept = m < rows, n < N
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    left = x + m[:, None] * K + k[None, :]
    right = weight + n[None, :].to(tl.int64) * K + k[:, None]
    added, second_added = 0.0, 0.0
    if bias is not None:
        added = tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == 5:
            second_added = tl.load(bias + N + n, mask=kept, other=0.0).to(tl.float32)[None, :]
    if LINKED:
        _fetch(weight, n, part * SPAN, N, K, SPAN)
        if ACTIVATION == 5:
            _fetch(weight + N * K, n, part * SPAN, N, K, SPAN)
        gdc_wait()
    for start in range(0, HALF, BLOCK_K):
        inside = k + start < K
        later = (k + start + HALF < K) & (k + start + HALF < part * SPAN + SPAN)
        a = tl.load(left + start, mask=live[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + start, mask=inside[:, None] & kept[None, :], other=0.0)
        c = tl.load(left + HALF + start, mask=live[:, None] & later[None, :], other=0.0)
        d = tl.load(right + HALF + start, mask=later[:, None] & kept[None, :], other=0.0)
        y = tl.dot(a, b, y, input_precision="ieee")
        z = tl.dot(c, d, z, input_precision="ieee")
        if ACTIVATION == 5:
            second = right + N * K + start
            b = tl.load(second, mask=inside[:, None] & kept[None, :], other=0.0)
            d = tl.load(second + HALF, mask=later[:, None] & kept[None, :], other=0.0)
            value = tl.dot(a, b, value, input_precision="ieee")
            other = tl.dot(c, d, other, input_precision="ieee")
    y = _activated(y + z + added, value + other + second_added, ACTIVATION)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    if PARTS:
        at += part * rows * N
    mask = live[:, None] & kept[None, :]
    if residual is not None:
        y += tl.load(residual + at, mask=mask, other=0.0)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm(
    out,  # (R, K)
    x,  # (R, K) float32
    parts,  # (S, R, K) float32 or None: a product in parts to add to x first
    parts_bias,  # (K,) or None: the bias of that product
    stream,  # (R, K) float32 or None: x after the addition
    weight,
    bias,
    eps,
    rows,
    S: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    LINKED: tl.constexpr,
):
    """Apply a norm to each row."""
    if LINKED:
        gdc_launch_dependents()
    row = tl.program_id(0)
    k = tl.arange(0, CHUNK)[None, :]
    gain, shift, earlier = (), (), ()
    if weight is not None:
        gain = _read(weight, k, k, True, K, K)
    if bias is not None:
        shift = _read(bias, k, k, True, K, K)
    if parts_bias is not None:
        earlier = _read(parts_bias, k, k, True, K, K)
    if LINKED:
        gdc_wait()
    h = _read(x, row * K + k, k, True, K, K)
    if parts is not None:
        h = _joined(h, parts, earlier, row * K + k, k, True, rows * K, K, S)
        for number in tl.static_range(len(h)):
            inside = k + number * CHUNK < K
            tl.store(stream + row * K + k + number * CHUNK, h[number], mask=inside)
    h = _normed(h, gain, shift, k, eps, K, NORM)
    for number in tl.static_range(len(h)):
        inside = k + number * CHUNK < K
        y = h[number].to(out.dtype.element_ty)
        tl.store(out + row * K + k + number * CHUNK, y, mask=inside)
