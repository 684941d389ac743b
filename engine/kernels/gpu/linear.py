# mypy: disable-error-code="no-untyped-def"
"""Projections of a launch's rows: x @ weight.T with the RMSNorm before it, or the bias, residual or SiLU gate behind it, in one kernel.

The kernels here stream the weights for a few rows: one row without tensor cores, more with the weights as the products' left operand. For
more than that cuBLAS multiplies and small kernels (norm.py) do the rest.

Weights are [out, in], row-major, a norm's weight multiplied into their columns; sums are float32; a row's result depends on no other row.
`in` (K) must be a multiple of 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import gpu
from engine.kernels.gpu import await_previous, by_kernel, jit, jit_once, power_of_two, resident, tl, triton
from engine.kernels.gpu.norm import rms_norm, rms_norm_twin, silu_mul, silu_mul_twin

MOST, MOST_NARROW, NARROW = 1, 32, 1024
"""Rows up to which a product is quicker here than in cuBLAS: of any matrix, and of one with no more than NARROW rows or columns
(docs/measurements/gpu.md)."""


@dataclass(frozen=True)
class Tiling:
    """One program takes `matrix_rows` rows of the weights (a gated output has two) and `depth` inputs at a time. Of many rows: so many
    `stages` are on their way at once, and `splits` programs share the inputs."""

    matrix_rows: int
    depth: int
    warps: int
    stages: int = 1
    splits: int = 1


ONE_ROW = Tiling(8, 1024, 8)
FEW_ROWS = Tiling(64, 128, 4, 4)
FEW_WIDE_ROWS = Tiling(16, 32, 4, 2)
"""float32: for checks, not for speed."""
TILINGS: dict[tuple[int, int, int], Tiling] = {
    (1, 1024, 2048): Tiling(4, 1024, 4),
    (1, 1024, 3072): Tiling(16, 256, 4),
    (1, 1024, 4096): Tiling(16, 1024, 8),
    (1, 2048, 1024): Tiling(8, 2048, 8),
    (1, 2048, 2048): Tiling(16, 1024, 8),
    (1, 2048, 4096): Tiling(16, 256, 4),
    (1, 2048, 6144): Tiling(4, 2048, 8),
    (1, 3072, 1024): Tiling(8, 1024, 8),
    (1, 6144, 2048): Tiling(8, 2048, 8),
    **{(rows, 2048, 1024): Tiling(64, 128, 4, 4, 2) for rows in (16, 32)},
    **{(rows, 3072, 1024): Tiling(64, 128, 4, 4, 2) for rows in (16, 32)},
}
"""What was quickest by (rows as padded, inputs, outputs), gated outputs counted once, at the released sizes (tools/gpu_tune.py)."""
RESIDENT: dict[tuple[int, int, int], int] = {
    (rows, inputs, outputs): splits
    for rows in (16, 32)
    for inputs, outputs, splits in ((1024, 4096, 1), (2048, 1024, 2), (1024, 3072, 1), (3072, 1024, 3), (1024, 2048, 1))
}
"""Products that are quicker yet on Hopper with their weights in shared memory before the rows are there (resident.py), by the same key, and how
many programs share the inputs of each."""


def norm_linear_twin(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    return F.linear(rms_norm_twin(x, None, eps), weight)


def linear_add_twin(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return residual.copy_((residual.float() + F.linear(x.float(), weight.float())).to(residual.dtype))


def norm_gate_up_twin(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    return silu_mul_twin(norm_linear_twin(x, eps, weight))


def linear_twin(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def norm_linear(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) @ weight.T: x [R, K], weight [N, K] -> [R, N]."""
    if not by_kernel(x):
        return norm_linear_twin(x, eps, weight)
    if not streamed(x.shape[0], weight.shape):
        return F.linear(rms_norm(x, None, eps), weight)
    return _stream(x, weight, x.new_empty(x.shape[0], weight.shape[0]), eps=eps)


def norm_linear_later(x: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """`norm_linear` and None; where cuBLAS multiplies x @ weight.T and x, by whose root mean square the reader is to divide (norm.py)."""
    if by_kernel(x) and not streamed(x.shape[0], weight.shape):
        return F.linear(x, weight), x
    return norm_linear(x, eps, weight), None


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual += x @ weight.T in place, rounded once: x [R, K], weight [N, K], residual [R, N], which is returned."""
    if not by_kernel(x):
        return linear_add_twin(x, weight, residual)
    if not streamed(x.shape[0], weight.shape):
        return torch.addmm(residual, x, weight.t(), out=residual)
    return _stream(x, weight, residual, add=True)


def norm_gate_up(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """SiLU(g) * u, g and u the halves of x / sqrt(mean(x^2) + eps) @ weight.T: x [R, K], weight [2 I, K] -> [R, I]."""
    if not by_kernel(x):
        return norm_gate_up_twin(x, eps, weight)
    if not streamed(x.shape[0], weight.shape):
        return silu_mul(F.linear(x, weight), x, eps)
    return _stream(x, weight, x.new_empty(x.shape[0], weight.shape[0] // 2), eps=eps, gated=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: x [R, K], weight [N, K], bias [N] -> `out` [R, N], or a new one."""
    if not by_kernel(x) or not streamed(x.shape[0], weight.shape):
        y = linear_twin(x, weight, bias)
        return y if out is None else out.copy_(y)
    return _stream(x, weight, x.new_empty(x.shape[0], weight.shape[0]) if out is None else out, bias=bias)


def streamed(rows: int, shape: Sequence[int]) -> bool:
    """Whether the kernels here multiply by a matrix of this shape."""
    return rows <= (MOST_NARROW if min(shape) <= NARROW else MOST)


def _tiling(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> Tiling:
    if dtype != torch.bfloat16:
        return ONE_ROW if rows == 1 else FEW_WIDE_ROWS
    return TILINGS.get((padded(rows), inputs, outputs), ONE_ROW if rows == 1 else FEW_ROWS)


def padded(rows: int) -> int:
    """How many rows a launch of so many computes: a product has 16 at least."""
    return 1 if rows == 1 else max(16, power_of_two(rows))


def _stream(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float | None = None,
    add: bool = False,
    bias: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Launch the kernel for one row or for few. out [R, outputs], also read where it is added to."""
    rows, inputs = x.shape
    outputs = out.shape[1]
    assert inputs % 8 == 0 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    splits = RESIDENT.get((padded(rows), inputs, outputs), 0)
    if splits and resident.usable(x):
        resident.launch(x, weight, out, _arrived(x.device), eps=eps, add=add, bias=bias, gated=gated, splits=splits, padded=padded(rows))
        return out
    t = _tiling(rows, inputs, outputs, x.dtype)
    options = {"num_warps": t.warps, "launch_pdl": True} if gpu.PDL else {"num_warps": t.warps}
    flags = {"NORM": eps is not None, "GATED": gated, "ADD": add, "BIAS": bias is not None, "PDL": gpu.PDL}
    operands = (x, weight, x if bias is None else bias, out)
    many = t.matrix_rows // 2 if gated else t.matrix_rows
    programs = triton.cdiv(outputs, many)
    depth = min(t.depth, power_of_two(inputs))
    if rows == 1:
        one_row_kernel[(programs,)](*operands, outputs, eps or 0.0, K=inputs, OUTPUTS=many, DEPTH=depth, **flags, **options)
        return out
    splits = 1 if eps is not None else t.splits
    part = triton.cdiv(triton.cdiv(inputs, splits), depth) * depth
    sums = x.new_empty(splits, rows, outputs, dtype=torch.float32) if splits > 1 else out
    few_rows_kernel[(programs, splits)](
        *operands, sums, _arrived(x.device) if splits > 1 else out, rows, outputs, eps or 0.0, K=inputs, ROWS=padded(rows), OUTPUTS=many,
        DEPTH=max(16, depth), PART=part, SPLITS=splits, STAGES=t.stages, EVEN=inputs == part * splits and outputs % many == 0,
        **flags, **options,
    )  # fmt: skip
    return out


_MOST_PROGRAMS = 4096
_counters: dict[torch.device, Tensor] = {}


def _arrived(device: torch.device) -> Tensor:
    """[_MOST_PROGRAMS] int32 zeros: which of the programs that share a tile comes last is found by counting, and that one leaves zero again."""
    if device not in _counters:
        _counters[device] = torch.zeros(_MOST_PROGRAMS, dtype=torch.int32, device=device)
    return _counters[device]


@jit
def prefetch_rows(rows, K: tl.constexpr, COUNT: tl.constexpr):
    """Ask for COUNT rows of K weights to be brought to the L2 cache, an eighth of a row a request."""
    size: tl.constexpr = K // 8 * (rows.dtype.element_ty.primitive_bitwidth // 8)
    eighth = tl.arange(0, 8)[None, :] * (K // 8)
    address = (rows[:, None] + eighth).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address, tl.full([COUNT, 8], size, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def one_row_kernel(
    x, weight, bias, out, n_out, eps,
    K: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: products in float32, weights from memory to registers once. Gate and up rows alternate in a gated tile."""
    HALVES: tl.constexpr = 2 if GATED else 1
    j = tl.arange(0, OUTPUTS * HALVES)
    n = tl.program_id(0) * OUTPUTS + j // HALVES
    there = n < n_out
    k = tl.arange(0, DEPTH)
    rows = weight + (tl.minimum(n, n_out - 1) + (j % HALVES) * n_out).to(tl.int64) * K
    # Weights are nobody's output: they are on their way before the kernel that makes x has ended.
    parts = ()  # type: ignore[var-annotated, unused-ignore]
    for start in tl.static_range(0, K, DEPTH):
        parts = parts + (tl.load(rows[:, None] + start + k[None, :], mask=there[:, None] & (start + k < K)[None, :], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    await_previous(PDL)
    m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Asked for now, so that it is there when the sum is.
    if BIAS:
        before = tl.load(bias + m, mask=m < n_out, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(out + m, mask=m < n_out, other=0.0).to(tl.float32)
    products = tl.zeros([OUTPUTS * HALVES, DEPTH], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    for start in tl.static_range(0, K, DEPTH):
        v = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += v * v
        products += parts[start // DEPTH].to(tl.float32) * v[None, :]
    total = tl.sum(products, 1)
    if NORM:
        total *= 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / K + eps)
    if GATED:
        gate, up = tl.split(tl.reshape(total, [OUTPUTS, 2]))
        total = gate / (1.0 + tl.exp(-gate)) * up
    if BIAS or ADD:
        total += before
    tl.store(out + m, total.to(out.dtype.element_ty), mask=m < n_out)


@jit
def finish(
    y, squares, before, out, m, r, live, n_out, eps,
    K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """What comes behind a product y [matrix rows, ROWS]: norm, gate, what is added, and away with it to outputs m."""
    if NORM:
        y *= (1.0 / tl.sqrt_rn(tl.sum(squares, 0) / K + eps))[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [OUTPUTS, 2, ROWS]), (0, 2, 1)))
        y = gate / (1.0 + tl.exp(-gate)) * up
    y += before
    tl.store(out + r[None, :] * n_out + m[:, None], y.to(out.dtype.element_ty), mask=(m < n_out)[:, None] & live[None, :])


@jit_once("rows")
def few_rows_kernel(
    x, weight, bias, out, sums, arrived, rows, n_out, eps,
    K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """2 rows or more, padded to ROWS: products of [matrix rows, DEPTH] with [DEPTH, ROWS]. The norm's root mean square goes onto the sum.
    Where programs share the inputs the last one adds up what all have left, in their order."""
    HALVES: tl.constexpr = 2 if GATED else 1
    j = tl.arange(0, OUTPUTS * HALVES)
    n = tl.program_id(0) * OUTPUTS + j // HALVES
    there = n < n_out
    r = tl.arange(0, ROWS)
    live = r < rows
    k = tl.arange(0, DEPTH)
    first = tl.program_id(1) * PART
    matrix_rows = weight + (tl.minimum(n, n_out - 1) + (j % HALVES) * n_out).to(tl.int64) * K + first
    weights = matrix_rows[:, None] + k[None, :]
    inputs = x + first + r[None, :] * K + k[:, None]
    if PDL and EVEN and PART % 64 == 0:
        prefetch_rows(matrix_rows, PART, OUTPUTS * HALVES)
    await_previous(PDL)
    m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Asked for now, so that it is there when the sum is.
    before = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if BIAS:
        before += tl.load(bias + m, mask=m < n_out, other=0.0).to(tl.float32)[:, None]
    if ADD:
        before += tl.load(out + r[None, :] * n_out + m[:, None], mask=(m < n_out)[:, None] & live[None, :], other=0.0).to(tl.float32)
    y = tl.zeros([OUTPUTS * HALVES, ROWS], tl.float32)
    squares = tl.zeros([DEPTH, ROWS], tl.float32)
    for start in tl.range(0, PART, DEPTH, num_stages=STAGES):
        if EVEN:
            w = tl.load(weights + start)
            v = tl.load(inputs + start, mask=live[None, :], other=0.0)
        else:
            inside = first + start + k < K
            w = tl.load(weights + start, mask=there[:, None] & inside[None, :], other=0.0)
            v = tl.load(inputs + start, mask=inside[:, None] & live[None, :], other=0.0)
        if NORM:
            wide = v.to(tl.float32)
            squares += wide * wide
        y = tl.dot(w, v, y, input_precision="ieee")
    if SPLITS == 1:
        finish(y, squares, before, out, m, r, live, n_out, eps, K, OUTPUTS, ROWS, NORM, GATED)
    else:
        mine = sums + r[None, :] * n_out + n[:, None]
        mask = there[:, None] & live[None, :]
        tl.store(mine + tl.program_id(1) * rows * n_out, y, mask=mask)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([OUTPUTS * HALVES, ROWS], tl.float32)
            for split in tl.static_range(SPLITS):
                total += tl.load(mine + split * rows * n_out, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
            finish(total, squares, before, out, m, r, live, n_out, eps, K, OUTPUTS, ROWS, NORM, GATED)
