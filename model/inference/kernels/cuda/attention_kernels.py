"""Triton kernels of attention in a decode step.

`attend` computes attention over each part of the keys in a separate program, and `combine` merges
the results. `write` fills the slots first if a step has several positions of a slot, or many rows.
`kernels.py` explains LINKED.

Source: Dao et al., Flash-Decoding (2023), for attention split along keys.

Shapes: R rows of a step, H = n_head, K = n_kv_head, G = H / K, D = head_dim, S slots, L positions
of a slot, P parts of keys.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from logitd.model.inference.kernels.cuda.kernels import ROW


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
    if LINKED:
        gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    if LINKED:
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
def _is_seen(part, position, PART: tl.constexpr, WINDOW: tl.constexpr):
    """True if a position attends to a key of this part."""
    return (part * PART <= position) & ((part + 1) * PART > position - WINDOW + 1)


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
    if LINKED:
        gdc_launch_dependents()
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // HK
    d = tl.arange(0, BLOCK_D)
    n = part * PART + tl.arange(0, PART)
    inside = d < D
    # `given` was written before the step's first kernel.
    slot = tl.load(given + ROW * row + 1)
    position = tl.load(given + ROW * row + 2)
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
            y = tl.sum(weights[:, None] * v.to(tl.float32), axis=0)  # (BLOCK_D,)
            to = (row * H + head * G + g) * P + part
            tl.store(parts + to * D + d, y, mask=inside)
            tl.store(scales + to * 2, most)
            tl.store(scales + to * 2 + 1, tl.sum(weights))
    elif LINKED:
        gdc_wait()


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
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LINKED: tl.constexpr,
):
    """Combine the parts of attention of a row's head into its output."""
    if LINKED:
        gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    d, p = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    position = tl.load(given + ROW * row + 2)  # written before the step's first kernel
    written = _is_seen(p, position, PART, WINDOW)
    inside = d < D
    at = (row * H + head) * P + p
    if LINKED:
        gdc_wait()
    most = tl.load(scales + at * 2, mask=written, other=float("-inf"))
    total = tl.load(scales + at * 2 + 1, mask=written, other=0.0)
    mask = written[:, None] & inside[None, :]
    y = tl.load(parts + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    weight = tl.exp(most - tl.max(most))
    y = tl.sum(weight[:, None] * y, axis=0) / tl.sum(weight * total)
    tl.store(out + (row * H + head) * D + d, y.to(out.dtype.element_ty), mask=inside)
