# mypy: disable-error-code="no-untyped-def"
"""Attention inside a frame of the Code Predictor, one kernel a layer and pass: a frame has at most a few positions, all rows of a launch
stand at the same one, and row r has cache place r, so that no address waits for a value to be read.

qkv [R, (H + 2 G) * D], or [2 R, ...] in the first pass, whose rows r and R + r are positions 0 and 1 of place r. keys, values [>= R, G, C, D],
C a power of two. cos, sin [>= C, D / 2] float32. D is a power of two from 16 up. `undivided`, as many rows [.., K] as qkv: that is first divided
by their root mean square (norm.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import gpu
from engine.kernels.gpu import await_previous, by_kernel, jit, jit_once, power_of_two, tl
from engine.kernels.gpu.attention import attention_twin, rope_write_twin
from engine.kernels.gpu.norm import one_over_rms

_MANY = 8
"""Rows from which a program is one warp."""


def frame_attention_twin(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, position: int, keys: Tensor, values: Tensor, scale: float,
    undivided: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows = len(qkv) // 2 if position == 0 else len(qkv)
    places = torch.arange(rows, dtype=torch.int32, device=qkv.device)
    at = torch.full_like(places, position)
    if position == 0:
        places, at = torch.cat((places, places)), torch.cat((at, at + 1))
    q = rope_write_twin(qkv, q_norm, k_norm, eps, cos, sin, places, at, keys, values, scale, undivided)
    return attention_twin(q, places, at, keys, values, None)


def frame_attention(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, position: int, keys: Tensor, values: Tensor, scale: float,
    undivided: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Per-head RMSNorm of q and k, rotation, q times `scale`, k and v to the cache, attention over positions 0..position -> [R, H * D].
    `position` 0: the first pass, positions 0 and 1 at once, [2 R, H * D]."""
    if not by_kernel(qkv):
        return frame_attention_twin(qkv, q_norm, k_norm, eps, cos, sin, position, keys, values, scale, undivided)
    groups, capacity, width = keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * groups
    assert qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous() and position < capacity == power_of_two(capacity)
    first = position == 0
    rows = len(qkv) // 2 if first else len(qkv)
    out = qkv.new_empty(len(qkv), heads * width)
    x = qkv if undivided is None else undivided
    options = {"launch_pdl": True} if gpu.PDL else {}
    frame_attention_kernel[(rows, groups)](
        qkv, q_norm, k_norm, eps, cos, sin, max(position, 1), keys, values, out, rows, scale, x, x.shape[1],
        GROUPS=groups, SHARE=heads // groups, QUERIES=power_of_two(heads // groups), WIDTH=width, CAPACITY=capacity, FIRST=first,
        UNDIVIDED=undivided is not None, INPUTS=power_of_two(x.shape[1]), PDL=gpu.PDL, num_warps=1 if rows >= _MANY else 4, **options,
    )  # fmt: skip
    return out


@jit
def turned(row, factor, there, w1, w2, c, s, eps, i, WIDTH: tl.constexpr):
    """The two halves of the heads at pointers `row` [heads, 1], zero where there is none: multiplied, normed and rotated."""
    first = tl.load(row + i, mask=there, other=0.0).to(tl.float32) * factor
    second = tl.load(row + WIDTH // 2 + i, mask=there, other=0.0).to(tl.float32) * factor
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    root = (1.0 / tl.sqrt_rn(square / WIDTH + eps))[:, None]
    first *= root * w1
    second *= root * w2
    return first * c - second * s, second * c + first * s


@jit_once("position", "rows")
def frame_attention_kernel(
    qkv, q_norm, k_norm, eps, cos, sin, position, keys, values, out, rows, scale, x, inputs,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr, FIRST: tl.constexpr, UNDIVIDED: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and kv head a program, with the SHARE query heads that use it."""
    HALF: tl.constexpr = WIDTH // 2
    LINE: tl.constexpr = (SHARE + 2) * GROUPS * WIDTH
    dtype = qkv.dtype.element_ty
    r = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, HALF)[None, :]
    d = tl.arange(0, WIDTH)[None, :]
    t = tl.arange(0, CAPACITY)
    h = tl.arange(0, QUERIES)[:, None]
    mine = h < SHARE
    one = tl.arange(0, 1)[:, None]
    qw1 = tl.load(q_norm + i).to(tl.float32)
    qw2 = tl.load(q_norm + HALF + i).to(tl.float32)
    kw1 = tl.load(k_norm + i).to(tl.float32)
    kw2 = tl.load(k_norm + HALF + i).to(tl.float32)
    c = tl.load(cos + position * HALF + i)
    s = tl.load(sin + position * HALF + i)
    cache = (r * GROUPS + group) * CAPACITY * WIDTH
    before = (t < position)[:, None]
    lines = cache + t[:, None] * WIDTH
    # What earlier passes left in the cache is there: of all kernels before this one only the last may still run, and that makes qkv alone.
    if not FIRST:
        k1 = tl.load(keys + lines + i, mask=before, other=0.0, cache_modifier=".cg")
        k2 = tl.load(keys + lines + HALF + i, mask=before, other=0.0, cache_modifier=".cg")
        v = tl.load(values + lines + d, mask=before, other=0.0, cache_modifier=".cg")
    await_previous(PDL)
    line = tl.where(FIRST, rows + r, r)
    row = qkv + line * LINE
    factor = one_over_rms(x, line, inputs, eps, INPUTS) if UNDIVIDED else 1.0
    q1, q2 = turned(row + (group * SHARE + h) * WIDTH, factor, mine, qw1, qw2, c, s, eps, i, WIDTH)
    own1, own2 = turned(row + (SHARE * GROUPS + group + one) * WIDTH, factor, one == 0, kw1, kw2, c, s, eps, i, WIDTH)
    own_v = (tl.load(row + ((SHARE + 1) * GROUPS + group) * WIDTH + d).to(tl.float32) * factor).to(dtype)
    q1 = (q1 * scale).to(dtype)
    q2 = (q2 * scale).to(dtype)
    own1 = own1.to(dtype)
    own2 = own2.to(dtype)
    if FIRST:
        start = qkv + r * LINE
        earlier = one_over_rms(x, r, inputs, eps, INPUTS) if UNDIVIDED else 1.0
        turn1, turn2 = tl.load(cos + i), tl.load(sin + i)
        first1, first2 = turned(start + (SHARE * GROUPS + group + one) * WIDTH, earlier, one == 0, kw1, kw2, turn1, turn2, eps, i, WIDTH)
        first_v = (tl.load(start + ((SHARE + 1) * GROUPS + group) * WIDTH + d).to(tl.float32) * earlier).to(dtype)
        first1 = first1.to(dtype)
        first2 = first2.to(dtype)
        at_first = (t == 0)[:, None]
        k1 = tl.where(at_first, first1, tl.zeros([CAPACITY, HALF], dtype))
        k2 = tl.where(at_first, first2, tl.zeros([CAPACITY, HALF], dtype))
        v = tl.where(at_first, first_v, tl.zeros([CAPACITY, WIDTH], dtype))
        tl.store(keys + cache + i, first1)
        tl.store(keys + cache + HALF + i, first2)
        tl.store(values + cache + d, first_v)
        # Position 0 sees itself alone.
        tl.store(out + (r * GROUPS + group) * SHARE * WIDTH + h * WIDTH + d, tl.broadcast_to(first_v, [QUERIES, WIDTH]), mask=mine)
    own = cache + position * WIDTH
    tl.store(keys + own + i, own1)
    tl.store(keys + own + HALF + i, own2)
    tl.store(values + own + d, own_v)
    here = (t == position)[:, None]
    k1 = tl.where(here, own1, k1).to(tl.float32)
    k2 = tl.where(here, own2, k2).to(tl.float32)
    v = tl.where(here, own_v, v).to(tl.float32)
    products = q1.to(tl.float32)[:, None, :] * k1[None, :, :] + q2.to(tl.float32)[:, None, :] * k2[None, :, :]
    scores = tl.where((t <= position)[None, :], tl.sum(products, 2), float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    weights /= tl.sum(weights, 1)[:, None]
    mixed = tl.sum(weights[:, :, None] * v[None, :, :], 1)
    tl.store(out + (line * GROUPS + group) * SHARE * WIDTH + h * WIDTH + d, mixed.to(dtype), mask=mine)
