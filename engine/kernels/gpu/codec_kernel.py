# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels behind `codec`: what the codec decoder does beside convolutions and its transformer."""

from __future__ import annotations

from engine.kernels.gpu import await_previous, tl, triton


@triton.jit(do_not_specialize=["batch", "frames", "limit"])
def history_kernel(
    state,
    arena,
    slots,
    decoded,
    table,
    batch,
    frames,
    blocks,
    limit,
    SAVE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of one row's state, from `state` [S, blocks * BLOCK] to the fronts of the arena's buffers, or back from their ends."""
    await_previous(PDL)
    b = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    slot = tl.load(slots + b).to(tl.int64)
    entry = table + block * 5
    offset = tl.load(entry)
    size = tl.load(entry + 1)
    new = frames * tl.load(entry + 2)
    base = batch * (tl.load(entry + 3) + frames * tl.load(entry + 4)) + b * (size + new)
    lane = tl.arange(0, BLOCK)
    inside = offset + lane < size
    kept = state + (slot * blocks + block) * BLOCK + lane
    if SAVE:
        tl.store(kept, tl.load(arena + base + new + offset + lane, mask=inside, other=0.0), mask=inside)
        if block == 0:
            tl.store(decoded + slot, tl.minimum(tl.load(decoded + slot) + frames, limit))
    else:
        begun = tl.load(decoded + slot) > 0
        tl.store(arena + base + offset + lane, tl.load(kept, mask=inside & begun, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["frames", "positions"])
def embed_kernel(
    codes,
    slots,
    decoded,
    skipped,
    tables,
    out,
    row_slots,
    row_positions,
    broken,
    frames,
    positions,
    groups,
    codebook,
    half,
    out_row,
    out_first,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One frame of one row: the first codebook's row, and beside it the sum of the others'."""
    await_previous(PDL)
    b = tl.program_id(0) // frames
    t = tl.program_id(0) % frames
    slot = tl.load(slots + b)
    position = tl.minimum(tl.load(decoded + slot) + t, positions - 1)
    tl.store(row_slots + tl.program_id(0), slot)
    tl.store(row_positions + tl.program_id(0), position)
    if t == 0:
        tl.store(broken + b, 0)
    g = tl.arange(0, GROUPS)
    lane = tl.arange(0, HALF)
    number = tl.maximum(position - tl.load(skipped + slot), 0)
    frame = codes + (slot.to(tl.int64) * positions + number) * groups
    code = tl.load(frame + g, mask=g < groups, other=0).to(tl.int32)
    inside = (g < groups)[:, None] & (lane < half)[None, :]
    rows = tl.load(tables + ((g * codebook + code) * half)[:, None] + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    first = tl.sum(tl.where((g == 0)[:, None], rows, 0.0), 0)
    rest = tl.sum(tl.where((g > 0)[:, None], rows, 0.0), 0)
    place = out + b.to(tl.int64) * out_row + out_first + t * (2 * half) + lane
    tl.store(place, first.to(out.dtype.element_ty), mask=lane < half)
    tl.store(place + half, rest.to(out.dtype.element_ty), mask=lane < half)


@triton.jit(do_not_specialize=["columns", "taps", "eps"])
def depthwise_norm_kernel(
    x,
    weight,
    bias,
    out,
    columns,
    channels,
    taps,
    eps,
    x_row,
    x_first,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One column: its channels' own convolutions, then their normalization."""
    await_previous(PDL)
    m = tl.program_id(0)
    b = m // columns
    t = m % columns
    c = tl.arange(0, WIDTH)
    inside = c < channels
    y = tl.load(bias + c, mask=inside, other=0.0)
    for tap in range(taps):
        column = x + b * x_row + x_first + (t + tap) * channels
        y += tl.load(column + c, mask=inside, other=0.0).to(tl.float32) * tl.load(weight + tap * channels + c, mask=inside, other=0.0)
    y = tl.where(inside, y - tl.sum(y, 0) / channels, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / channels + eps)
    tl.store(out + m * channels + c, y.to(out.dtype.element_ty), mask=inside)
