# mypy: disable-error-code="no-untyped-def"
"""The kernels of sample.py. A row's threshold for top-k is found exactly, without a sort."""

from __future__ import annotations

from engine.kernels.gpu import await_previous, jit, jit_once, tl


@jit
def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@jit
def uniform(seed, frame, group, groups):
    """The number in [0, 1), float64, of (seed int64, frame, group): SplitMix64."""
    counter = (frame * groups + group + 1).to(tl.uint64)
    z = mix(mix(seed.to(tl.uint64)) + counter * 0x9E3779B97F4A7C15)
    return (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@jit
def order_of(scores):
    """int32 keys in the order of float32 scores; both zeros have one."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def kth_largest(scores, there, k):
    """The k-th largest of the scores that are `there`, or the least of them where there are no more than k. A round counts how many reach
    each of 8 bounds between two scores, and is the last one once what is left between the bounds is one value, however often it comes."""
    i = tl.arange(0, 8)
    found = tl.min(tl.where(there, scores, float("inf")), 0)
    high = tl.max(tl.where(there, scores, float("-inf")), 0)
    low = found
    above = tl.sum((there & (scores > found)).to(tl.int32), 0)
    rounds = 0
    # Infinite scores have no end of rounds; what is drawn from them is nothing anyway.
    while (above >= k) & (rounds < 64):
        bounds = tl.where(i == 7, high, low + (high - low) * ((i + 1) * 0.125))
        reach = tl.sum((there[:, None] & (scores[:, None] >= bounds[None, :])).to(tl.int32), 0)
        low = tl.maximum(low, tl.max(tl.where(reach >= k, bounds, float("-inf")), 0))
        high = tl.minimum(high, tl.min(tl.where(reach >= k, float("inf"), bounds), 0))
        found = tl.min(tl.where(there & (scores >= low), scores, float("inf")), 0)
        above = tl.sum((there & (scores > found)).to(tl.int32), 0)
        rounds += 1
    return found


@jit
def nucleus(keys, weights, there, top_p):
    """Which of the keys top-p keeps: all but the ascending tail whose summed weight is at most 1 - p of the whole, and the best."""
    limit = (1.0 - top_p) * tl.sum(weights, 0)
    low = tl.min(tl.where(there, keys, 0x7FFFFFFF), 0).to(tl.int64) - 1
    high = tl.max(tl.where(there, keys, -0x7FFFFFFF), 0).to(tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        heavy = tl.sum(tl.where(there & (keys <= middle.to(tl.int32)), weights, 0.0), 0) > limit
        low = tl.where(heavy, low, middle)
        high = tl.where(heavy, middle, high)
    edge = high.to(tl.int32)
    # The tail may end among equal scores: as many of them go as fit, the first ones.
    tied = there & (keys == edge)
    rank = tl.cumsum(tied.to(tl.int32), 0)
    below = tl.sum(tl.where(there & (keys < edge), weights, 0.0), 0)
    each = tl.max(tl.where(tied, weights, 0.0), 0)
    gone = (below + rank.to(tl.float32) * each <= limit) & (rank < tl.sum(tied.to(tl.int32), 0))
    return there & (keys >= edge) & ~(tied & gone)


@jit
def draw(logits, width, number, temperature, top_k, top_p, greedy):
    """The token drawn from logits [BLOCK], of which `width` count."""
    if greedy != 0.0:
        picked = tl.argmax(logits, 0).to(tl.int32)
    else:
        j = tl.arange(0, logits.shape[0])
        scores = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
        kept = (j < width) & (scores > float("-inf"))
        kept = kept & (scores >= kth_largest(scores, kept, tl.maximum(top_k.to(tl.int32), 1)))
        weights = tl.where(kept, tl.exp(scores - tl.max(scores, 0)), 0.0)
        if top_p < 1.0:
            kept = nucleus(order_of(scores), weights, kept, top_p)
            weights = tl.where(kept, weights, 0.0)
        wide = weights.to(tl.float64)
        cumulative = tl.cumsum(wide, 0)
        past = (weights > 0.0) & (cumulative > number * tl.sum(wide, 0))
        picked = tl.min(tl.where(past, j, width), 0).to(tl.int32)
        if picked == width:
            picked = tl.max(tl.where(weights > 0.0, j, 0), 0).to(tl.int32)
    return tl.minimum(picked, width - 1)


@jit
def talker_sample_kernel(
    logits, slots, vocab, codebook, eos, groups, min_tokens, seed, steps, sampling, parameters, may_end, seen, token,
    codes, positions, code_groups, drawn, idle, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    r = tl.program_id(0).to(tl.int64)
    await_previous(PDL)
    slot = tl.load(slots + r).to(tl.int64)
    own = sampling + slot * parameters
    # Whatever a row needs is asked for at once: each wait for memory is a good part of this kernel's time.
    step = tl.load(steps + slot)
    temperature, top_k, top_p, greedy = tl.load(own), tl.load(own + 2), tl.load(own + 4), tl.load(own + 6)
    own_penalty = tl.load(own + 8)
    own_seed = tl.load(seed + slot)
    own_may_end = tl.load(may_end + slot)
    j = tl.arange(0, BLOCK)
    code = j < codebook
    raw = tl.load(logits + r * vocab + tl.where(code, j, eos), mask=j <= codebook, other=float("-inf")).to(tl.float32)
    broken = tl.sum((code & ~(tl.abs(raw) < float("inf"))).to(tl.int32), 0) > 0
    repeated = tl.load(seen + slot * codebook + j, mask=code, other=0) != 0
    penalty = tl.zeros_like(raw) + own_penalty
    raw = tl.where(repeated, tl.where(raw < 0.0, raw * penalty, tl.div_rn(raw, penalty)), raw)
    may = (own_may_end != 0) & (step >= min_tokens)
    raw = tl.where((j == codebook) & ~may, float("-inf"), raw)
    picked = draw(raw, codebook + 1, uniform(own_seed, step, 0, groups), temperature, top_k, top_p, greedy)
    picked = tl.where(broken, 0, picked)
    tl.store(drawn + r, tl.where(broken, -1, picked))
    kept = tl.minimum(picked, codebook - 1)
    tl.store(token + slot, kept)
    tl.store(seen + slot * codebook + kept, 1)
    tl.store(codes + (slot * positions + tl.minimum(step, positions - 1)) * code_groups, kept.to(tl.int16))
    tl.store(steps + slot, step + tl.where(slot == idle, 0, 1))


@jit_once("group", "width")
def predictor_sample_kernel(
    logits, slots, vocab, group, groups, seed, steps, sampling, parameters, codes, positions, code_groups, table, x_out, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program; width 0: there is no table."""
    r = tl.program_id(0).to(tl.int64)
    await_previous(PDL)
    slot = tl.load(slots + r).to(tl.int64)
    own = sampling + slot * parameters + 1
    frame = tl.maximum(tl.load(steps + slot) - 1, 0)
    temperature, top_k, top_p, greedy = tl.load(own), tl.load(own + 2), tl.load(own + 4), tl.load(own + 6)
    own_seed = tl.load(seed + slot)
    j = tl.arange(0, BLOCK)
    raw = tl.load(logits + r * vocab + j, mask=j < vocab, other=float("-inf")).to(tl.float32)
    picked = draw(raw, vocab, uniform(own_seed, frame, group, groups), temperature, top_k, top_p, greedy)
    tl.store(codes + (slot * positions + tl.minimum(frame, positions - 1)) * code_groups + group, picked.to(tl.int16))
    i = tl.arange(0, WIDTH)
    for start in tl.range(0, width, WIDTH):
        inside = start + i < width
        row = tl.load(table + picked.to(tl.int64) * width + start + i, mask=inside)
        tl.store(x_out + r * width + start + i, row, mask=inside)


@jit
def frame_end_kernel(
    slots, codes, steps, tables, offsets, frame_sum, positions, groups, width, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """A part of one row's sum a program."""
    await_previous(PDL)
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    frame = tl.minimum(tl.maximum(tl.load(steps + slot) - 1, 0), positions - 1)
    g = tl.arange(0, GROUPS)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (g < groups)[:, None] & (i < width)[None, :]
    code = tl.load(codes + (slot * positions + frame) * groups + g, mask=g < groups, other=0).to(tl.int64)
    rows = tables + (code + tl.load(offsets + g, mask=g < groups, other=0))[:, None] * width
    total = tl.sum(tl.load(rows + i[None, :], mask=mask, other=0.0).to(tl.float32), 0)
    tl.store(frame_sum + slot * width + i, total.to(frame_sum.dtype.element_ty), mask=i < width)


@jit
def talker_input_kernel(slots, steps, prompt, text, frame_sum, text_table, x, positions, text_length, width, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """A part of one row a program."""
    r = tl.program_id(0).to(tl.int64)
    await_previous(PDL)
    slot = tl.load(slots + r).to(tl.int64)
    step = tl.load(steps + slot)
    word = tl.load(text + slot * text_length + tl.minimum(step, text_length - 1)).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = i < width
    total = tl.load(frame_sum + slot * width + i, mask=inside).to(tl.float32) + tl.load(text_table + word * width + i, mask=inside).to(tl.float32)
    tl.store(x + r * width + i, total.to(x.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(positions + r, tl.load(prompt + slot) + step)


@jit
def predictor_input_kernel(slots, hidden, token, table, last, x, hidden_width, width, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """A part of one row a program."""
    r = tl.program_id(0).to(tl.int64)
    await_previous(PDL)
    slot = tl.load(slots + r).to(tl.int64)
    code = tl.load(token + slot).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    tl.store(last + r * hidden_width + i, tl.load(hidden + slot * hidden_width + i, mask=i < hidden_width), mask=i < hidden_width)
    tl.store(x + r * width + i, tl.load(table + code * width + i, mask=i < width), mask=i < width)


@jit
def mail_kernel(control, index, value, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index + i, mask=i < count, other=-1)
    tl.store(control + place, tl.load(value + i, mask=i < count, other=0), mask=place >= 0)
