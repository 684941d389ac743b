# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding, the cache's writing and grouped-query attention over each row's own slot: in two kernels, so that rows of one slot see
each other, or in one where a launch has one row a slot.

qkv [R, (H + 2 G) * D]: H query heads, G key and G value heads of D numbers. keys, values [S, G, C, D]: position p lies at p % C. cos, sin
[P, D / 2] float32 by position; a position beyond the table takes its last row. slots, positions [R] int32. D is a power of two from 16 up.
`undivided` [R, K]: qkv is first divided by the root mean square of these rows (norm.py).
Rows that pad a launch may share a slot and a position: what they get is of no use, and hurts nobody."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import gpu
from engine.kernels.gpu import await_previous, by_kernel, jit, power_of_two, tl
from engine.kernels.gpu.norm import divided_twin, load_row, one_over_rms

_FEW = 32
"""Rows up to which a launch has two programs at most for each multiprocessor (docs/measurements/gpu.md)."""


def rope_write_twin(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float, undivided: Tensor | None = None,
) -> Tensor:  # fmt: skip
    groups, capacity, width = keys.shape[1:]
    rows = qkv.shape[0]
    wide = (qkv.float() if undivided is None else divided_twin(qkv, undivided, eps)).view(rows, -1, width)
    heads = wide.shape[1] - 2 * groups
    at = positions.long().clamp(max=cos.shape[0] - 1)
    slot, place = slots.long(), positions.long() % capacity
    q = _rotate(_head_norm(wide[:, :heads], q_norm, eps), cos[at], sin[at]) * scale
    keys[slot, :, place] = _rotate(_head_norm(wide[:, heads : heads + groups], k_norm, eps), cos[at], sin[at]).to(keys.dtype)
    values[slot, :, place] = wide[:, heads + groups :].to(values.dtype)
    return q.to(qkv.dtype)


def attention_twin(q: Tensor, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor, window: int | None = None) -> Tensor:
    groups, capacity, width = keys.shape[1:]
    rows, heads = q.shape[:2]
    position = positions.long()[:, None]
    # What lies at ring index i is the last position up to the row's own with that remainder.
    held = position - (position - torch.arange(capacity, device=q.device)) % capacity
    seen = (held >= 0) & (held > position - min(window or capacity, capacity))
    own = keys[slots.long()].float(), values[slots.long()].float()
    scores = torch.einsum("rgqd,rgcd->rgqc", q.float().view(rows, groups, heads // groups, width), own[0])
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    # What no row may see may also be no number.
    safe = own[1].masked_fill(~seen[:, None, :, None], 0.0)
    return torch.einsum("rgqc,rgcd->rgqd", weights, safe).reshape(rows, heads * width).to(q.dtype)


def decode_attention_twin(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float, undivided: Tensor | None = None,
) -> Tensor:  # fmt: skip
    q = rope_write_twin(qkv, q_norm, k_norm, eps, cos, sin, slots, positions, keys, values, scale, undivided)
    return attention_twin(q, slots, positions, keys, values, None)


def _head_norm(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    return x if w is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, heads, D] with cos, sin [R, D / 2]."""
    first, second = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def rope_write(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float, undivided: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Per-head RMSNorm of q and k (where there are weights), rotation, q times `scale`: k and v go to the cache, q [R, H, D] comes back."""
    assert slots.is_contiguous() and positions.is_contiguous()
    if not by_kernel(qkv):
        return rope_write_twin(qkv, q_norm, k_norm, eps, cos, sin, slots, positions, keys, values, scale, undivided)
    groups, capacity, width = keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * groups
    assert qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous() and (q_norm is None) == (k_norm is None)
    q = qkv.new_empty(qkv.shape[0], heads, width)
    x = qkv if undivided is None else undivided
    options = {"launch_pdl": True} if gpu.PDL else {}
    rope_write_kernel[(qkv.shape[0], heads + 2 * groups)](
        qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, eps, cos, sin, cos.shape[0],
        slots, positions, keys, values, q, capacity, scale, x, x.shape[1],
        HEADS=heads, GROUPS=groups, WIDTH=width, NORM=q_norm is not None, UNDIVIDED=undivided is not None, INPUTS=power_of_two(x.shape[1]),
        PDL=gpu.PDL, num_warps=1, **options,
    )  # fmt: skip
    return q


def attention(q: Tensor, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor, window: int | None = None) -> Tensor:
    """Each row q [R, H, D] over the positions max(0, p - window + 1)..p of its slot -> [R, H * D]; softmax in float32."""
    assert slots.is_contiguous() and positions.is_contiguous()
    if not by_kernel(q):
        return attention_twin(q, slots, positions, keys, values, window)
    groups, capacity, width = keys.shape[1:]
    rows, heads = q.shape[:2]
    assert q.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    out = q.new_empty(rows, heads * width)
    options = {"launch_pdl": True} if gpu.PDL else {}
    attention_kernel[(rows, groups)](
        q, slots, positions, keys, values, out, capacity, min(window or capacity, capacity),
        GROUPS=groups, SHARE=heads // groups, WIDTH=width, PDL=gpu.PDL, **_blocks(len(slots), heads // groups, width, capacity), **options,
    )  # fmt: skip
    return out


def decode_attention(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float, undivided: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`rope_write`, then `attention` over all the cache holds, in one kernel: for launches with one row a slot -> [R, H * D]."""
    assert slots.is_contiguous() and positions.is_contiguous()
    if not by_kernel(qkv):
        return decode_attention_twin(qkv, q_norm, k_norm, eps, cos, sin, slots, positions, keys, values, scale, undivided)
    groups, capacity, width = keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * groups
    assert qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous() and (q_norm is None) == (k_norm is None)
    out = qkv.new_empty(qkv.shape[0], heads * width)
    x = qkv if undivided is None else undivided
    options = {"launch_pdl": True} if gpu.PDL else {}
    decode_attention_kernel[(qkv.shape[0], groups)](
        qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, eps, cos, sin, cos.shape[0],
        slots, positions, keys, values, out, capacity, scale, x, x.shape[1],
        GROUPS=groups, SHARE=heads // groups, WIDTH=width, NORM=q_norm is not None, UNDIVIDED=undivided is not None,
        INPUTS=power_of_two(x.shape[1]), PDL=gpu.PDL, **_blocks(len(slots), heads // groups, width, capacity), **options,
    )  # fmt: skip
    return out


def _blocks(rows: int, share: int, width: int, capacity: int) -> dict[str, int]:
    """A product needs 16 of everything: query heads and half heads are padded to it. Three blocks of 32 keys and values let four programs share a
    multiprocessor, of 64 two: which are quicker where there are programs for no more."""
    most = 64 if rows <= _FEW else 32
    block = max(16, min(most, power_of_two(capacity)))
    return {"QUERIES": max(16, power_of_two(share)), "HALF": max(16, width // 2), "BLOCK": block, "num_warps": 4 if block == most else 2}


# In the kernels all is asked for before anything is made of it: a sum over a row is waited for by whatever stands behind it.


@jit
def load_halves(base, i, inside, WIDTH: tl.constexpr):
    """The two halves of each head at the pointers `base` [heads, 1], or of one head at the pointer `base`; zero outside."""
    first = tl.load(base + i, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(base + WIDTH // 2 + i, mask=inside, other=0.0).to(tl.float32)


@jit
def rotate_halves(first, second, factor, w1, w2, eps, c, s, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """Heads [.., D / 2] twice, multiplied, normed and rotated."""
    first *= factor
    second *= factor
    if NORM:
        root = 1.0 / tl.sqrt_rn((tl.sum(first * first, 1) + tl.sum(second * second, 1))[:, None] / WIDTH + eps)
        first *= root * w1
        second *= root * w2
    return first * c - second * s, second * c + first * s


@jit
def attend(
    q1, q2, best, total, mixed, keys, values, start, end, capacity,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over positions start..end - 1 of one slot and kv head, block after block, on top of what (best, total, mixed) hold."""
    i = tl.arange(0, HALF)
    d = tl.arange(0, WIDTH)
    t = tl.arange(0, BLOCK)
    near = i < WIDTH // 2
    for block in tl.range(start, end, BLOCK, num_stages=3):
        there = block + t < end
        at = ((block + t) % capacity) * WIDTH
        k1 = tl.load(keys + at[None, :] + i[:, None], mask=there[None, :] & near[:, None], other=0.0)
        k2 = tl.load(keys + at[None, :] + WIDTH // 2 + i[:, None], mask=there[None, :] & near[:, None], other=0.0)
        v = tl.load(values + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q2, k2, tl.dot(q1, k1, input_precision="ieee"), input_precision="ieee")
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        best = higher
    return best, total, mixed


@jit
def rope_write_kernel(
    qkv, q_norm, k_norm, eps, cos, sin, table, slots, positions, keys, values, q, capacity, scale, x, inputs,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, UNDIVIDED: tl.constexpr, INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row a program: query heads, then key heads, then value heads, as they lie in qkv."""
    r = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = tl.where(head < HEADS + GROUPS, head - HEADS, head - HEADS - GROUPS)
    i = tl.arange(0, WIDTH // 2)[None, :]
    near = i < WIDTH // 2
    w1, w2 = load_halves(tl.where(head < HEADS, q_norm, k_norm), i, near, WIDTH)
    await_previous(PDL)
    first, second = load_halves(qkv + r * ((HEADS + 2 * GROUPS) * WIDTH) + head * WIDTH, i, near, WIDTH)
    if UNDIVIDED:
        before = load_row(x, r, inputs, INPUTS)
    position = tl.load(positions + r)
    cache = ((tl.load(slots + r).to(tl.int64) * GROUPS + group) * capacity + position % capacity) * WIDTH
    turn = tl.minimum(position, table - 1) * (WIDTH // 2) + i
    c = tl.load(cos + turn)
    s = tl.load(sin + turn)
    factor = one_over_rms(before, inputs, eps) if UNDIVIDED else 1.0
    if head < HEADS:
        first, second = rotate_halves(first, second, factor, w1, w2, eps, c, s, WIDTH, NORM)
        place = q + (r * HEADS + head) * WIDTH + i
        tl.store(place, (first * scale).to(q.dtype.element_ty))
        tl.store(place + WIDTH // 2, (second * scale).to(q.dtype.element_ty))
    elif head < HEADS + GROUPS:
        first, second = rotate_halves(first, second, factor, w1, w2, eps, c, s, WIDTH, NORM)
        tl.store(keys + cache + i, first.to(keys.dtype.element_ty))
        tl.store(keys + cache + WIDTH // 2 + i, second.to(keys.dtype.element_ty))
    else:
        tl.store(values + cache + i, (first * factor).to(values.dtype.element_ty))
        tl.store(values + cache + WIDTH // 2 + i, (second * factor).to(values.dtype.element_ty))


@jit
def attention_kernel(
    q, slots, positions, keys, values, out, capacity, window,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row and kv head a program, with the SHARE query heads that use it."""
    r = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    await_previous(PDL)
    position = tl.load(positions + r)
    cache = (tl.load(slots + r).to(tl.int64) * GROUPS + group) * capacity * WIDTH
    h = tl.arange(0, QUERIES)
    i = tl.arange(0, HALF)
    d = tl.arange(0, WIDTH)
    rows = (r * GROUPS + group) * SHARE * WIDTH + h[:, None] * WIDTH
    inside = (h < SHARE)[:, None] & (i < WIDTH // 2)[None, :]
    q1 = tl.load(q + rows + i[None, :], mask=inside, other=0.0)
    q2 = tl.load(q + rows + WIDTH // 2 + i[None, :], mask=inside, other=0.0)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    start = tl.maximum(position - window + 1, 0)
    best, total, mixed = attend(q1, q2, best, total, mixed, keys + cache, values + cache, start, position + 1, capacity, WIDTH, HALF, BLOCK)
    tl.store(out + rows + d[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=(h < SHARE)[:, None])


@jit
def decode_attention_kernel(
    qkv, q_norm, k_norm, eps, cos, sin, table, slots, positions, keys, values, out, capacity, scale, x, inputs,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, UNDIVIDED: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As attention_kernel, with the row's own key and value from registers, on their way to the cache."""
    r = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    h = tl.arange(0, QUERIES)[:, None]
    i = tl.arange(0, HALF)[None, :]
    d = tl.arange(0, WIDTH)
    near = i < WIDTH // 2
    qw1, qw2 = load_halves(q_norm, i, near, WIDTH)
    kw1, kw2 = load_halves(k_norm, i, near, WIDTH)
    await_previous(PDL)
    row = qkv + r * ((SHARE + 2) * GROUPS * WIDTH)
    q1, q2 = load_halves(row + (group * SHARE + h) * WIDTH, i, (h < SHARE) & near, WIDTH)
    k1, k2 = load_halves(row + (SHARE * GROUPS + group) * WIDTH, i, near, WIDTH)
    v = tl.load(row + ((SHARE + 1) * GROUPS + group) * WIDTH + d).to(tl.float32)
    if UNDIVIDED:
        before = load_row(x, r, inputs, INPUTS)
    position = tl.load(positions + r)
    cache = (tl.load(slots + r).to(tl.int64) * GROUPS + group) * capacity * WIDTH
    turn = tl.minimum(position, table - 1) * (WIDTH // 2) + i
    c = tl.load(cos + turn, mask=near, other=0.0)
    s = tl.load(sin + turn, mask=near, other=0.0)
    factor = one_over_rms(before, inputs, eps) if UNDIVIDED else 1.0
    q1, q2 = rotate_halves(q1, q2, factor, qw1, qw2, eps, c, s, WIDTH, NORM)
    q1 = (q1 * scale).to(qkv.dtype.element_ty)
    q2 = (q2 * scale).to(qkv.dtype.element_ty)
    k1, k2 = rotate_halves(k1, k2, factor, kw1, kw2, eps, c, s, WIDTH, NORM)
    k1 = k1.to(keys.dtype.element_ty)
    k2 = k2.to(keys.dtype.element_ty)
    v = (v * factor).to(values.dtype.element_ty)
    own = cache + (position % capacity) * WIDTH
    tl.store(keys + own + i, k1, mask=near)
    tl.store(keys + own + WIDTH // 2 + i, k2, mask=near)
    tl.store(values + own + d, v)
    best = tl.sum(q1.to(tl.float32) * k1.to(tl.float32) + q2.to(tl.float32) * k2.to(tl.float32), 1)
    total = tl.full([QUERIES], 1.0, tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32) + v.to(tl.float32)[None, :]
    start = tl.maximum(position - capacity + 1, 0)
    best, total, mixed = attend(q1, q2, best, total, mixed, keys + cache, values + cache, start, position, capacity, WIDTH, HALF, BLOCK)
    rows = (r * GROUPS + group) * SHARE * WIDTH + h * WIDTH
    tl.store(out + rows + d[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=h < SHARE)
