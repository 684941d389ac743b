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
def widest(least, most, count, least_too, most_too, count_too):
    return tl.minimum(least, least_too), tl.maximum(most, most_too), count + count_too


@jit
def counted(least, most, a, b, c, d, least_too, most_too, a_too, b_too, c_too, d_too):
    return tl.minimum(least, least_too), tl.maximum(most, most_too), a + a_too, b + b_too, c + c_too, d + d_too


@jit
def pair(scores, there, first, second):
    """Whether each score reaches two bounds, side by side in an int32."""
    return tl.where(there & (scores >= first), 1, 0) + tl.where(there & (scores >= second), 65536, 0)


@jit
def narrowed(low, high, reached, bound, count, k):
    """Bracket [low, high) of the k-th largest, `reached` scores from low up, after `count` were found to reach a bound."""
    enough = count >= k
    return (
        tl.where(enough & (bound > low), bound, low),
        tl.where(enough, high, tl.minimum(high, bound)),
        tl.where(enough, tl.minimum(reached, count), reached),
    )


@jit
def narrowed_twice(low, high, reached, first, second, counts, k):
    low, high, reached = narrowed(low, high, reached, first, counts & 65535, k)
    return narrowed(low, high, reached, second, counts >> 16, k)


@jit
def top(scores, there, k):
    """The k largest of the scores that are `there`, with all that equal the least of them; and the largest. Fewer than 32768 scores.

    A bracket around the k-th largest is cut in nine by each round until k scores reach its lower end, or all within it are equal. A round is
    one reduction: what a thread waits for here is the other warps."""
    infinity = float("inf")
    least, best, reached = tl.reduce((tl.where(there, scores, infinity), tl.where(there, scores, -infinity), there.to(tl.int32)), 0, widest)
    bits = (best + 0.0).to(tl.int32, bitcast=True)
    low = least
    # The number next to the largest: none reaches it.
    high = (bits + tl.where(bits < 0, -1, 1)).to(tl.float32, bitcast=True)
    most = best
    rounds = 0
    # Infinite scores have no end of rounds; what is drawn from them is nothing anyway.
    while (reached > k) & (least < most) & (rounds < 64):
        step = (high - low) * (1.0 / 9.0)
        b1, b2, b3, b4 = low + step, low + step * 2.0, low + step * 3.0, low + step * 4.0
        b5, b6, b7, b8 = low + step * 5.0, low + step * 6.0, low + step * 7.0, low + step * 8.0
        inside = there & (scores >= low) & (scores < high)
        least, most, c12, c34, c56, c78 = tl.reduce(
            (
                tl.where(inside, scores, infinity), tl.where(inside, scores, -infinity),
                pair(scores, there, b1, b2), pair(scores, there, b3, b4), pair(scores, there, b5, b6), pair(scores, there, b7, b8),
            ), 0, counted,
        )  # fmt: skip
        low, high, reached = narrowed_twice(low, high, reached, b1, b2, c12, k)
        low, high, reached = narrowed_twice(low, high, reached, b3, b4, c34, k)
        low, high, reached = narrowed_twice(low, high, reached, b5, b6, c56, k)
        low, high, reached = narrowed_twice(low, high, reached, b7, b8, c78, k)
        rounds += 1
    return there & (scores >= low), best


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
        kept, best = top(scores, (j < width) & (scores > float("-inf")), tl.maximum(top_k.to(tl.int32), 1))
        weights = tl.where(kept, tl.exp(scores - best), 0.0)
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
def early(place, mask=None):
    """What another kernel has written and is not the one before this: read before that one is over, and past what a processor keeps of old."""
    return tl.load(place, mask=mask, other=None if mask is None else 0, cache_modifier=".cg")


@jit
def talker_sample_kernel(
    logits, slots, vocab, codebook, eos, groups, min_tokens, seed, steps, sampling, parameters, may_end, seen, token,
    codes, positions, code_groups, drawn, idle, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program. The kernel before it makes the logits alone, so all else is there before that one is over."""
    r = tl.program_id(0).to(tl.int64)
    slot = early(slots + r).to(tl.int64)
    own = sampling + slot * parameters
    step = early(steps + slot)
    temperature, top_k, top_p, greedy = early(own), early(own + 2), early(own + 4), early(own + 6)
    own_penalty = early(own + 8)
    own_may_end = early(may_end + slot)
    number = uniform(early(seed + slot), step, 0, groups)
    j = tl.arange(0, BLOCK)
    code = j < codebook
    repeated = early(seen + slot * codebook + j, code) != 0
    await_previous(PDL)
    raw = tl.load(logits + r * vocab + tl.where(code, j, eos), mask=j <= codebook, other=float("-inf")).to(tl.float32)
    broken = tl.sum((code & ~(tl.abs(raw) < float("inf"))).to(tl.int32), 0) > 0
    penalty = tl.zeros_like(raw) + own_penalty
    raw = tl.where(repeated, tl.where(raw < 0.0, raw * penalty, tl.div_rn(raw, penalty)), raw)
    may = (own_may_end != 0) & (step >= min_tokens)
    raw = tl.where((j == codebook) & ~may, float("-inf"), raw)
    picked = draw(raw, codebook + 1, number, temperature, top_k, top_p, greedy)
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
    """One row a program; width 0: there is no table. The kernel before it makes the logits alone, so all else is there before that one is over."""
    r = tl.program_id(0).to(tl.int64)
    slot = early(slots + r).to(tl.int64)
    own = sampling + slot * parameters + 1
    frame = tl.maximum(early(steps + slot) - 1, 0)
    temperature, top_k, top_p, greedy = early(own), early(own + 2), early(own + 4), early(own + 6)
    number = uniform(early(seed + slot), frame, group, groups)
    j = tl.arange(0, BLOCK)
    await_previous(PDL)
    raw = tl.load(logits + r * vocab + j, mask=j < vocab, other=float("-inf")).to(tl.float32)
    picked = draw(raw, vocab, number, temperature, top_k, top_p, greedy)
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
    """A part of one row's sum a program. The kernel before it draws the last group's code, so all others are summed before that one is over."""
    slot = early(slots + tl.program_id(0)).to(tl.int64)
    frame = tl.minimum(tl.maximum(early(steps + slot) - 1, 0), positions - 1)
    g = tl.arange(0, GROUPS)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = i < width
    known = g < groups - 1
    row = codes + (slot * positions + frame) * groups
    code = early(row + g, known).to(tl.int64)
    rows = tables + (code + early(offsets + g, known))[:, None] * width
    total = tl.sum(early(rows + i[None, :], known[:, None] & inside[None, :]).to(tl.float32), 0)
    last = tables + early(offsets + groups - 1).to(tl.int64) * width + i
    await_previous(PDL)
    total += tl.load(last + tl.load(row + groups - 1).to(tl.int64) * width, mask=inside, other=0.0).to(tl.float32)
    tl.store(frame_sum + slot * width + i, total.to(frame_sum.dtype.element_ty), mask=inside)


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
