# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernel behind `conv`: a causal convolution as one matrix product, with everything elementwise in its epilogue."""

from __future__ import annotations

from engine.kernels.gpu import await_previous, tl, triton

NONE = tl.constexpr(0)
SNAKE = tl.constexpr(1)
GELU = tl.constexpr(2)
PCM = tl.constexpr(3)


@triton.jit
def round_even(x):
    """Nearest integer, half to even, of |x| < 2^22: beyond 2^23 a float32 has no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def snake(x, frequency, depth):
    """x + depth * sin^2(pi * x * frequency). sin^2 has period pi, so |r| <= 1/2; the polynomial in r^2 is off by 4e-7 at most."""
    u = x * frequency
    r = u - round_even(u)
    q = r * r
    wave = 0.07765591224331467 * q - 0.5982904112667203
    wave = wave * q + 2.550077386526186
    wave = wave * q - 5.167710076668165
    wave = (wave * q + 3.1415926400772016) * r
    return x + depth * (wave * wave)


@triton.jit(do_not_specialize=["rows", "columns", "taps", "has_residual", "has_raw"])
def conv_kernel(
    x,
    weight,
    bias,
    frequency,
    depth,
    residual,
    raw,
    out,
    broken,
    rows,
    columns,
    channels,
    outputs,
    taps,
    x_row,
    x_first,
    x_step,
    x_tap,
    residual_row,
    residual_first,
    out_row,
    out_first,
    has_residual,
    has_raw,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Output row m is column m % columns of batch row m // columns. Its inputs are `taps` runs of `channels` elements, `x_tap` apart,
    from x + b * x_row + x_first + t * x_step on; weight [outputs, taps * channels]. `raw` [rows, outputs] gets the sum before the
    activation. WHOLE: BK divides channels. A row beyond `rows` and an output beyond `outputs` repeats the last and is not stored."""
    across = tl.cdiv(outputs, BN)
    program = tl.program_id(0)
    m = (program // across) * BM + tl.arange(0, BM)
    n = (program % across) * BN + tl.arange(0, BN)
    n_inside = n < outputs
    m_safe = tl.minimum(m, rows - 1)
    n_safe = tl.minimum(n, outputs - 1)
    b = m_safe // columns
    t = m_safe - b * columns
    k = tl.arange(0, BK)
    x_rows = x + (b * x_row + x_first + t * x_step)[:, None] + k[None, :]
    w_rows = weight + (n_safe * (taps * channels))[None, :] + k[:, None]
    blocks = tl.cdiv(channels, BK)
    total = tl.zeros((BM, BN), tl.float32)
    await_previous(PDL)
    for i in range(taps * blocks):
        tap = i // blocks
        c = (i - tap * blocks) * BK
        if WHOLE:
            a = tl.load(x_rows + (tap * x_tap + c))
            w = tl.load(w_rows + (tap * channels + c))
        else:
            a = tl.load(x_rows + (tap * x_tap + c), mask=(k < channels - c)[None, :], other=0.0)
            w = tl.load(w_rows + (tap * channels + c), mask=(k < channels - c)[:, None], other=0.0)
        total = tl.dot(a, w, total, input_precision=PRECISION)
    y = total + tl.load(bias + n_safe)[None, :]
    inside = (m < rows)[:, None] & n_inside[None, :]
    if has_residual:
        y += tl.load(residual + (b * residual_row + residual_first + t * outputs)[:, None] + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if has_raw:
        tl.store(raw + (m_safe * outputs)[:, None] + n[None, :], y.to(raw.dtype.element_ty), mask=inside)
    if ACT == SNAKE:
        y = snake(y, tl.load(frequency + n_safe)[None, :], tl.load(depth + n_safe)[None, :])
    if ACT == GELU:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    place = out + (b * out_row + out_first + t * outputs)[:, None] + n[None, :]
    if ACT == PCM:
        # A difference with itself is zero for finite numbers only.
        whole = (y - y) == 0.0
        lost = tl.max(tl.where(whole, 0, 1), 1)
        tl.store(broken + b, lost, mask=(lost > 0) & (m < rows))
        clamped = tl.minimum(tl.maximum(tl.where(whole, y, 0.0), -1.0), 1.0)
        tl.store(place, round_even(clamped * 32767.0).to(tl.int16), mask=inside)
    else:
        tl.store(place, y.to(out.dtype.element_ty), mask=inside)
