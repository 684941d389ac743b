# mypy: disable-error-code="no-untyped-def"
"""Projections of a launch's rows: x @ weight.T with the RMSNorm before it, or the bias, residual or SiLU gate behind it, in one kernel.

Up to FEW rows, FEW_NORMED where they are normed first, the kernels here stream the weights: one row without tensor
cores, more with the weights as the products' left operand. Beyond that cuBLAS multiplies and small kernels (norm.py) do the rest.

Weights are [out, in], row-major; sums are float32; a row's result depends on no other row. `in` (K) must be a multiple of 8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import gpu
from engine.kernels.gpu import by_kernel, jit, jit_once, power_of_two, tl, triton
from engine.kernels.gpu.norm import rms_norm, rms_norm_twin, silu_mul, silu_mul_twin

FEW = 16
"""Rows up to which a product is quicker here than in cuBLAS (docs/measurements/gpu.md)."""
FEW_NORMED = 1
"""The same where the rows are normed first: with more of them a kernel of its own for that and cuBLAS are quicker."""


@dataclass(frozen=True)
class Tiling:
    """One program makes `outputs` outputs (twice as many weight rows where gated) and takes `depth` inputs at a time, `stages` deep."""

    outputs: int
    depth: int
    warps: int
    stages: int = 1


ONE_ROW = Tiling(outputs=8, depth=2048, warps=8)
FEW_ROWS = Tiling(outputs=16, depth=256, warps=4, stages=6)
FEW_WIDE_ROWS = Tiling(outputs=16, depth=64, warps=4, stages=2)
"""float32: for checks, not for speed."""


def norm_linear_twin(x: Tensor, norm_w: Tensor, eps: float, weight: Tensor) -> Tensor:
    return F.linear(rms_norm_twin(x, norm_w, eps), weight)


def linear_add_twin(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return residual.copy_((residual.float() + F.linear(x.float(), weight.float())).to(residual.dtype))


def norm_gate_up_twin(x: Tensor, norm_w: Tensor, eps: float, weight: Tensor) -> Tensor:
    return silu_mul_twin(norm_linear_twin(x, norm_w, eps, weight))


def linear_twin(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def norm_linear(x: Tensor, norm_w: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMSNorm(x) @ weight.T: x [R, K], norm_w [K], weight [N, K] -> [R, N]."""
    if not by_kernel(x):
        return norm_linear_twin(x, norm_w, eps, weight)
    if x.shape[0] > FEW_NORMED:
        return F.linear(rms_norm(x, norm_w, eps), weight)
    return _stream(x, weight, x.new_empty(x.shape[0], weight.shape[0]), norm=(norm_w, eps))


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual += x @ weight.T in place, rounded once: x [R, K], weight [N, K], residual [R, N], which is returned."""
    if not by_kernel(x):
        return linear_add_twin(x, weight, residual)
    if x.shape[0] > FEW:
        return torch.addmm(residual, x, weight.t(), out=residual)
    return _stream(x, weight, residual, add=residual)


def norm_gate_up(x: Tensor, norm_w: Tensor, eps: float, weight: Tensor) -> Tensor:
    """SiLU(g) * u, g and u the halves of RMSNorm(x) @ weight.T: x [R, K], norm_w [K], weight [2 I, K] -> [R, I]."""
    if not by_kernel(x):
        return norm_gate_up_twin(x, norm_w, eps, weight)
    if x.shape[0] > FEW_NORMED:
        return silu_mul(F.linear(rms_norm(x, norm_w, eps), weight))
    return _stream(x, weight, x.new_empty(x.shape[0], weight.shape[0] // 2), norm=(norm_w, eps), gated=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: x [R, K], weight [N, K], bias [N] -> [R, N]."""
    if not by_kernel(x):
        return linear_twin(x, weight, bias)
    if x.shape[0] > FEW:
        return F.linear(x, weight, bias)
    return _stream(x, weight, x.new_empty(x.shape[0], weight.shape[0]), bias=bias)


def _stream(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    add: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:
    """Launch the kernel for one row or for few; `tiling` is for measurements. out [R, outputs], also read where it is `add`."""
    rows, inputs = x.shape
    assert inputs % 8 == 0 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    t = tiling or (ONE_ROW if rows == 1 else FEW_ROWS if x.dtype == torch.bfloat16 else FEW_WIDE_ROWS)
    norm_w, eps = norm if norm is not None else (x, 0.0)
    options = {"num_warps": t.warps, "launch_pdl": True} if gpu.PDL else {"num_warps": t.warps}
    flags = {"NORM": norm is not None, "GATED": gated, "ADD": add is not None, "BIAS": bias is not None, "PDL": gpu.PDL}
    operands = (x, norm_w, weight, x if bias is None else bias, out)
    programs = (triton.cdiv(out.shape[1], t.outputs),)
    depth = min(t.depth, power_of_two(inputs))
    if rows == 1:
        one_row_kernel[programs](*operands, out.shape[1], eps, K=inputs, OUTPUTS=t.outputs, DEPTH=depth, **flags, **options)
    else:
        # A product needs 16 inputs at least; each warp multiplies a part of its own of the inputs.
        parts = max(1, min(t.warps, depth // 16))
        few_rows_kernel[programs](
            *operands, rows, out.shape[1], eps, K=inputs, ROWS=max(16, power_of_two(rows)), OUTPUTS=t.outputs,
            PARTS=parts, PART=max(16, depth // parts), STAGES=t.stages, **flags, **options,
        )  # fmt: skip
    return out


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
    x, norm_w, weight, bias, out, n_out, eps,
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
    # Weights are nobody's output: the first of them are on their way before the kernel that makes x has ended.
    w = tl.load(rows[:, None] + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if K > DEPTH and K % 64 == 0:
            prefetch_rows(rows, K, OUTPUTS * HALVES)
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([OUTPUTS * HALVES], tl.float32)
    square = 0.0
    for start in tl.static_range(0, K, DEPTH):
        inside = start + k < K
        if start > 0:
            w = tl.load(rows[:, None] + start + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        v = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            square += tl.sum(v * v, 0)
            v *= tl.load(norm_w + start + k, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(w.to(tl.float32) * v[None, :], 1)
    if NORM:
        total *= 1.0 / tl.sqrt_rn(square / K + eps)
    if GATED:
        gate, up = tl.split(tl.reshape(total, [OUTPUTS, 2]))
        total = gate / (1.0 + tl.exp(-gate)) * up
        n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        there = n < n_out
    if BIAS:
        total += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(out + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=there)


@jit_once("rows")
def few_rows_kernel(
    x, norm_w, weight, bias, out, rows, n_out, eps,
    K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """2 to 32 rows, padded to ROWS: products of [PARTS, outputs, PART] with [PARTS, PART, ROWS], one part a warp, so that a warp's chain of
    dependent products is short. The norm's weight goes into x, its root mean square onto the sum."""
    HALVES: tl.constexpr = 2 if GATED else 1
    j = tl.arange(0, OUTPUTS * HALVES)
    n = tl.program_id(0) * OUTPUTS + j // HALVES
    there = n < n_out
    r = tl.arange(0, ROWS)
    live = r < rows
    k = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    matrix_rows = weight + (tl.minimum(n, n_out - 1) + (j % HALVES) * n_out).to(tl.int64) * K
    weights = matrix_rows[None, :, None] + k[:, None, :]
    inputs = x + r[None, None, :] * K + k[:, :, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if K % 64 == 0:
            prefetch_rows(matrix_rows, K, OUTPUTS * HALVES)
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([PARTS, OUTPUTS * HALVES, ROWS], tl.float32)
    square = tl.zeros([PARTS, ROWS], tl.float32)
    for start in tl.range(0, K, PARTS * PART, num_stages=STAGES):
        inside = start + k < K
        w = tl.load(weights + start, mask=there[None, :, None] & inside[:, None, :], other=0.0)
        v = tl.load(inputs + start, mask=inside[:, :, None] & live[None, None, :], other=0.0)
        if NORM:
            wide = v.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            scale = tl.load(norm_w + start + k, mask=inside, other=0.0).to(tl.float32)
            v = (wide * scale[:, :, None]).to(x.dtype.element_ty)
        total = tl.dot(w, v, total, input_precision="ieee")
    y = tl.sum(total, 0)
    if NORM:
        y *= (1.0 / tl.sqrt_rn(tl.sum(square, 0) / K + eps))[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [OUTPUTS, 2, ROWS]), (0, 2, 1)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        there = n < n_out
    mask = there[:, None] & live[None, :]
    if BIAS:
        y += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[:, None]
    places = out + r[None, :] * n_out + n[:, None]
    if ADD:
        y += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, y.to(out.dtype.element_ty), mask=mask)
