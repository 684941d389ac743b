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
from engine.kernels.gpu import await_previous, by_kernel, jit_once, power_of_two, tl
from engine.kernels.gpu.attention import attention_twin, load_halves, rope_write_twin, rotate_halves
from engine.kernels.gpu.norm import load_row, one_over_rms

_MANY = 16
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
    qw1, qw2 = load_halves(q_norm, i, i < HALF, WIDTH)
    kw1, kw2 = load_halves(k_norm, i, i < HALF, WIDTH)
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
    q1, q2 = load_halves(row + (group * SHARE + h) * WIDTH, i, mine, WIDTH)
    own1, own2 = load_halves(row + (SHARE * GROUPS + group) * WIDTH, i, i < HALF, WIDTH)
    own_v = tl.load(row + ((SHARE + 1) * GROUPS + group) * WIDTH + d).to(tl.float32)
    if UNDIVIDED:
        undivided = load_row(x, line, inputs, INPUTS)
    if FIRST:
        start = qkv + r * LINE
        first1, first2 = load_halves(start + (SHARE * GROUPS + group) * WIDTH, i, i < HALF, WIDTH)
        first_v = tl.load(start + ((SHARE + 1) * GROUPS + group) * WIDTH + d).to(tl.float32)
    factor = one_over_rms(undivided, inputs, eps) if UNDIVIDED else 1.0
    q1, q2 = rotate_halves(q1, q2, factor, qw1, qw2, eps, c, s, WIDTH, True)
    own1, own2 = rotate_halves(own1, own2, factor, kw1, kw2, eps, c, s, WIDTH, True)
    q1 = (q1 * scale).to(dtype)
    q2 = (q2 * scale).to(dtype)
    own1 = own1.to(dtype)
    own2 = own2.to(dtype)
    own_v = (own_v * factor).to(dtype)
    if FIRST:
        earlier = one_over_rms(load_row(x, r, inputs, INPUTS), inputs, eps) if UNDIVIDED else 1.0
        first1, first2 = rotate_halves(first1, first2, earlier, kw1, kw2, eps, tl.load(cos + i), tl.load(sin + i), WIDTH, True)
        first1 = first1.to(dtype)
        first2 = first2.to(dtype)
        first_v = (first_v * earlier).to(dtype)
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
