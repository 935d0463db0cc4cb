"""Triton kernels of a decode step. A step needs few launches. A row's sums do not depend on other
rows.

Every kernel computes in float32 and reads weights, keys and values in the model's dtype. The
residual stream stays in float32. `forward.py` chooses sizes and launches the kernels in order.

Programmatic dependent launch (LINKED): a kernel starts while the one before it still runs, loads
its weights, and waits for the earlier kernel's results with `gdc_wait`. No kernel writes before
this wait.

Sources: Dao et al., Flash-Decoding (2023) for attention split along keys; NVIDIA's CUDA programming
guide for programmatic dependent launch.

Shapes: R rows of a step, H = n_head, K = n_kv_head, G = H / K, D = head_dim, S slots, L positions
of a slot, P parts of keys.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROW = tl.constexpr(10)
"""Number of integers of an uploaded row: token, slot, position, row of a sampled token, then the
sampling parameters."""
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
        gdc_launch_dependents()
        gdc_wait()
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
def _normed(x, weight, bias, inside, eps, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """Normalize a row x (BLOCK,), whose elements are 0 where `inside` is false."""
    if NORM == 1:
        x = tl.where(inside, x - tl.sum(x) / WIDTH, 0.0)
    if NORM != 0:
        x = x * tl.rsqrt(tl.sum(x * x) / WIDTH + eps) * weight
    if bias is not None:
        x += bias
    return x


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
def _is_seen(part, position, PART: tl.constexpr, WINDOW: tl.constexpr):
    """True if a position attends to a key of this part."""
    return (part * PART <= position) & ((part + 1) * PART > position - WINDOW + 1)


@triton.jit
def _part(parts, scales, head, part, column, inside, position, D: tl.constexpr, P: tl.constexpr,
          PART: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """Load attention's results over one part of the keys: the largest scores, the sums of
    exponentials and the outputs."""
    written = inside & (part < P) & _is_seen(part, position, PART, WINDOW)
    at = head * P + part
    most = tl.load(scales + at * 2, mask=written, other=float("-inf"))
    total = tl.load(scales + at * 2 + 1, mask=written, other=0.0)
    out = tl.load(parts + at * D + column % D, mask=written, other=0.0)
    return most, total, out


@triton.jit
def _heads(parts, scales, given, row, column, inside, H: tl.constexpr, D: tl.constexpr,
           P: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """Columns of the heads' outputs (H * D): attention's parts, weighted and added in order."""
    position = tl.load(given + ROW * row + 2)
    head = row * H + column // D
    most = tl.full(column.shape, -1e30, tl.float32)
    total = tl.zeros(column.shape, tl.float32)
    out = tl.zeros(column.shape, tl.float32)
    for first in range(0, P, 4):
        # Load four at a time, to wait for memory only once.
        m0, t0, o0 = _part(parts, scales, head, first, column, inside, position,
                            D, P, PART, WINDOW)  # fmt: skip
        m1, t1, o1 = _part(parts, scales, head, first + 1, column, inside, position,
                            D, P, PART, WINDOW)  # fmt: skip
        m2, t2, o2 = _part(parts, scales, head, first + 2, column, inside, position,
                            D, P, PART, WINDOW)  # fmt: skip
        m3, t3, o3 = _part(parts, scales, head, first + 3, column, inside, position,
                            D, P, PART, WINDOW)  # fmt: skip
        higher = tl.maximum(tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)), most)
        w, w0, w1 = tl.exp(most - higher), tl.exp(m0 - higher), tl.exp(m1 - higher)
        w2, w3 = tl.exp(m2 - higher), tl.exp(m3 - higher)
        total = w * total + w0 * t0 + w1 * t1 + w2 * t2 + w3 * t3
        out = w * out + w0 * o0 + w1 * o1 + w2 * o2 + w3 * o3
        most = higher
    return out / tl.where(inside, total, 1.0)


@triton.jit
def linear(
    out,  # (R, N)
    x,  # (R, K), or the parts of attention
    scales,  # the parts' scales, or None
    given,
    weight,  # (N, K); with SwiGLU (2 N, K)
    bias,  # (N,) or None
    residual,  # (R, N) float32 or None
    norm_weight,  # (K,) or None
    norm_bias,  # (K,) or None
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINKED: tl.constexpr,
):
    """norm(x) times a matrix, for few rows: each program holds some of the matrix's rows."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside, kept = k < K, column < N
    at = column[:, None].to(tl.int64) * K + k[None, :]
    matrix = tl.load(weight + at, mask=kept[:, None] & inside[None, :], other=0.0)
    second = matrix
    if ACTIVATION == 5:
        second = tl.load(weight + N * K + at, mask=kept[:, None] & inside[None, :], other=0.0)
    gain, shift = None, None
    if norm_weight is not None:
        gain = tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
    if norm_bias is not None:
        shift = tl.load(norm_bias + k, mask=inside, other=0.0).to(tl.float32)
    if LINKED:
        gdc_launch_dependents()
        gdc_wait()
    for row in tl.static_range(ROWS):
        if scales is not None:
            h = _heads(x, scales, given, row, k, inside, H, D, P, PART, WINDOW)
        else:
            h = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
            h = _normed(h, gain, shift, inside, eps, K, NORM)
        y = tl.sum(matrix.to(tl.float32) * h[None, :], axis=1)  # (BLOCK_N,)
        value = y
        if ACTIVATION == 5:
            value = tl.sum(second.to(tl.float32) * h[None, :], axis=1)
        if bias is not None:
            y += tl.load(bias + column, mask=kept, other=0.0).to(tl.float32)
            if ACTIVATION == 5:
                value += tl.load(bias + N + column, mask=kept, other=0.0).to(tl.float32)
        y = _activated(y, value, ACTIVATION)
        if residual is not None:
            y += tl.load(residual + row * N + column, mask=kept, other=0.0)
        tl.store(out + row * N + column, y.to(out.dtype.element_ty), mask=kept)


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
    `norm` later adds the parts, the bias and the residual."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    k = part * SPAN + tl.arange(0, BLOCK_K)
    live, kept = m < rows, n < N
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    left = x + m[:, None] * K + k[None, :]
    right = weight + n[None, :].to(tl.int64) * K + k[:, None]
    if LINKED:
        gdc_launch_dependents()
        gdc_wait()
    for start in range(0, SPAN, BLOCK_K):
        inside = k + start < K
        a = tl.load(left + start, mask=live[:, None] & inside[None, :], other=0.0)
        mask = inside[:, None] & kept[None, :]
        b = tl.load(right + start, mask=mask, other=0.0)
        y = tl.dot(a, b, y, input_precision="ieee")
        if ACTIVATION == 5:
            b = tl.load(right + N * K + start, mask=mask, other=0.0)
            value = tl.dot(a, b, value, input_precision="ieee")
    if bias is not None:
        y += tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == 5:
            value += tl.load(bias + N + n, mask=kept, other=0.0).to(tl.float32)[None, :]
    y = _activated(y, value, ACTIVATION)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    if PARTS:
        at += part * rows * N
    mask = live[:, None] & kept[None, :]
    if residual is not None:
        y += tl.load(residual + at, mask=mask, other=0.0)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm(
    out,  # (R, C)
    x,  # (R, C) float32
    parts,  # (S, R, C) float32 or None: a product in parts to add to x first
    added,  # (C,) or None: the bias of the product
    stream,  # (R, C) float32 or None: x after the addition
    weight,
    bias,
    eps,
    rows,
    S: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    LINKED: tl.constexpr,
):
    """Apply a norm to each row."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain, shift = None, None
    if weight is not None:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if LINKED:
        gdc_launch_dependents()
        gdc_wait()
    h = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    if parts is not None:
        for part in tl.static_range(S):
            h += tl.load(parts + (part * rows + row) * WIDTH + column, mask=inside, other=0.0)
        if added is not None:
            h += tl.load(added + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(stream + row * WIDTH + column, h, mask=inside)
    h = _normed(h, gain, shift, inside, eps, WIDTH, NORM)
    tl.store(out + row * WIDTH + column, h.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine(
    out,  # (R, H * D)
    parts,
    scales,
    given,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    LINKED: tl.constexpr,
):
    """Combine the parts of attention into the heads' outputs."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < H * D
    if LINKED:
        gdc_launch_dependents()
        gdc_wait()
    h = _heads(parts, scales, given, row, column, inside, H, D, P, PART, WINDOW)
    tl.store(out + row * H * D + column, h.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turned(row, column, inside, norm_weight, cos, sin, position, eps,
            D: tl.constexpr, NORMED: tl.constexpr):  # fmt: skip
    """A query or a key (BLOCK,) of one head after its norm and rotation."""
    x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x) / D + eps)
        x = x * scale * tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if cos is not None:
        half: tl.constexpr = D // 2
        other = (column + half) % D
        y = tl.load(row + other, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            y = y * scale * tl.load(norm_weight + other, mask=inside, other=0.0).to(tl.float32)
        angle = position * half + column % half
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        x = x * c + tl.where(column < half, -s, s) * y
    return x


@triton.jit
def write(
    qkv,  # (R, (H + 2 K) * D)
    given,
    keys,  # (S, K, L, D) of a layer
    values,
    key_norm,
    cos,
    sin,
    eps,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LINKED: tl.constexpr,
):
    """Write the keys and values of a step into their slots."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    if LINKED:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(given + ROW * row + 1)
    position = tl.load(given + ROW * row + 2)
    start = qkv + row * (H + 2 * HK) * D
    k = _turned(start + (H + head) * D, d, inside, key_norm, cos, sin, position, eps, D, NORMED)
    v = tl.load(start + (H + HK + head) * D + d, mask=inside, other=0.0)
    at = ((slot * HK + head) * L + position) * D + d
    tl.store(keys + at, k.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + at, v.to(values.dtype.element_ty), mask=inside)


@triton.jit
def attend(
    parts,  # (R, H, P, D) float32
    scales,  # (R, H, P, 2) float32: largest score, sum of exponentials
    qkv,  # (R, (H + 2 K) * D)
    given,
    keys,  # (S, K, L, D) of a layer
    values,
    query_norm,
    key_norm,
    cos,
    sin,
    eps,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    NORMED: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LINKED: tl.constexpr,
):
    """Attention of a row's query heads over one part of the keys that they share.

    WINDOW: number of keys that a position attends to, its own included; L if all.

    WRITE: if true, the row's own key and value come from `qkv` and are written into the slot;
    otherwise the slot already holds them.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // HK
    d = tl.arange(0, BLOCK_D)
    n = part * PART + tl.arange(0, PART)
    inside = d < D
    # `given` was written before the step's first kernel.
    slot = tl.load(given + ROW * row + 1)
    position = tl.load(given + ROW * row + 2)
    if LINKED:
        gdc_launch_dependents()
    if _is_seen(part, position, PART, WINDOW):
        base = (slot * HK + head) * L * D
        at = base + n[:, None] * D + d[None, :]
        seen = (n <= position) & (n > position - WINDOW)
        old = seen & (n != position) if WRITE else seen
        mask = old[:, None] & inside[None, :]
        if LINKED and not WRITE:
            gdc_wait()
        # With WRITE, nothing in flight writes to the keys and values read here.
        k = tl.load(keys + at, mask=mask, other=0.0)
        v = tl.load(values + at, mask=mask, other=0.0)
        if LINKED and WRITE:
            gdc_wait()
        start = qkv + row * (H + 2 * HK) * D
        if WRITE:  # noqa: SIM102
            if position < (part + 1) * PART:
                new_k = _turned(start + (H + head) * D, d, inside, key_norm, cos, sin, position,
                                eps, D, NORMED).to(keys.dtype.element_ty)  # fmt: skip
                new_v = tl.load(start + (H + HK + head) * D + d, mask=inside, other=0.0)
                new_v = new_v.to(values.dtype.element_ty)
                tl.store(keys + base + position * D + d, new_k, mask=inside)
                tl.store(values + base + position * D + d, new_v, mask=inside)
                own = n == position
                k = tl.where(own[:, None], new_k[None, :], k)
                v = tl.where(own[:, None], new_v[None, :], v)
        for g in tl.static_range(G):
            q = _turned(start + (head * G + g) * D, d, inside, query_norm, cos, sin, position,
                        eps, D, NORMED)  # fmt: skip
            q = q * (D**-0.5)
            scores = tl.sum(k.to(tl.float32) * q[None, :], axis=1)  # (PART,)
            scores = tl.where(seen, scores, float("-inf"))
            most = tl.max(scores)
            weights = tl.exp(scores - most)
            out = tl.sum(weights[:, None] * v.to(tl.float32), axis=0)  # (BLOCK_D,)
            to = (row * H + head * G + g) * P + part
            tl.store(parts + to * D + d, out, mask=inside)
            tl.store(scales + to * 2, most)
            tl.store(scales + to * 2 + 1, tl.sum(weights))
    elif LINKED:
        gdc_wait()
