# mypy: disable-error-code="no-untyped-def"
"""RMSNorm and the SiLU gate of many rows, beside matrix products that are cuBLAS's.

Dividing a row by its root mean square may wait until after a product: what reads the product then does it (`undivided`), and no kernel of its
own is needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import gpu
from engine.kernels.gpu import await_previous, by_kernel, jit, power_of_two, tl, triton

_GATE_BLOCK = 1024


def rms_norm_twin(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if w is None else normed * w.float()).to(x.dtype)


def silu_mul_twin(gate_up: Tensor, undivided: Tensor | None = None, eps: float = 0.0) -> Tensor:
    gate, up = (gate_up.float() if undivided is None else divided_twin(gate_up, undivided, eps)).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def divided_twin(y: Tensor, undivided: Tensor, eps: float) -> Tensor:
    """float32."""
    return y.float() * torch.rsqrt(undivided.float().square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps), the mean in float32: x [R, K], w [K] or none -> [R, K]."""
    if not by_kernel(x):
        return rms_norm_twin(x, w, eps)
    assert x.is_contiguous()
    out = torch.empty_like(x)
    options = {"launch_pdl": True} if gpu.PDL else {}
    scale = x if w is None else w
    rms_norm_kernel[(x.shape[0],)](
        x, scale, out, x.shape[1], eps, BLOCK=power_of_two(x.shape[1]), SCALE=w is not None, PDL=gpu.PDL, num_warps=8, **options
    )
    return out


def silu_mul(gate_up: Tensor, undivided: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """SiLU(g) * u of the halves of gate_up [R, 2 I], divided by the root mean square of the rows `undivided` [R, K] if given -> [R, I]."""
    if not by_kernel(gate_up):
        return silu_mul_twin(gate_up, undivided, eps)
    x = gate_up if undivided is None else undivided
    assert gate_up.is_contiguous() and x.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    options = {"launch_pdl": True} if gpu.PDL else {}
    silu_mul_kernel[(rows, triton.cdiv(width, _GATE_BLOCK))](
        gate_up, x, out, width, x.shape[1], eps,
        BLOCK=_GATE_BLOCK, UNDIVIDED=undivided is not None, INPUTS=power_of_two(x.shape[1]), PDL=gpu.PDL, num_warps=4, **options,
    )  # fmt: skip
    return out


@jit
def load_row(x, row, width, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    return tl.load(x + row * width + k, mask=k < width, other=0.0).to(tl.float32)


@jit
def one_over_rms(v, width, eps):
    return 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / width + eps)


@jit
def rms_norm_kernel(x, w, out, width, eps, BLOCK: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < width
    await_previous(PDL)
    v = load_row(x, row, width, BLOCK)
    v *= one_over_rms(v, width, eps)
    if SCALE:
        v *= tl.load(w + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + k, v.to(out.dtype.element_ty), mask=inside)


@jit
def silu_mul_kernel(
    gate_up, x, out, width, inputs, eps, BLOCK: tl.constexpr, UNDIVIDED: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    await_previous(PDL)
    gate = tl.load(gate_up + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    if UNDIVIDED:
        root = one_over_rms(load_row(x, row, inputs, INPUTS), inputs, eps)
        gate *= root
        up *= root
    tl.store(out + row * width + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)
