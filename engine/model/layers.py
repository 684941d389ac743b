"""The layers Talker, Code Predictor and the codec's transformer are made of: maths only. Attention over what, is the caller's `attend`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import TransformerConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [N, heads, head_dim], k [N, kv_heads, head_dim], v [N, kv_heads, head_dim]) -> [N, heads * head_dim]; q is already scaled."""


def rms(x: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) over the last dimension. On a CPU this takes half the time of F.rms_norm at a few rows."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


class Norm(nn.Module):
    """RMSNorm: w * x * rsqrt(mean(x^2) + eps), the mean in float32 (reference, section 7)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.eps) * self.weight


def rope(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [N, 1, head_dim], of N positions (any shape, flattened), for the half-split rotation
    x * cos + roll(x, half) * sin; the sign of the first half lies in sin. Angles are computed in float32."""
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angle = positions.flatten().to(torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, head_dim] with cos, sin [N, 1, head_dim] from `rope`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Grouped-query attention with optional per-head RMSNorm of q and k before the rotation."""

    def __init__(self, config: TransformerConfig, *, qk_norm: bool) -> None:
        super().__init__()
        c = config
        self.heads, self.kv_heads, self.head_dim, self.eps = c.heads, c.kv_heads, c.head_dim, c.eps
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        if qk_norm:
            self.q_norm, self.k_norm = Norm(c.head_dim, c.eps), Norm(c.head_dim, c.eps)
        self.qk_norm = qk_norm
        self.qkv: Tensor
        self.out: Tensor
        self.qk_scale: Tensor

    def fuse(self) -> None:
        """After loading: one matrix for q, k, v, and one row of weights for both norms with the softmax scale folded into q's.
        Matrices lie [in, out]: for a few rows a CPU multiplies them twice as fast that way."""
        self.qkv = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)).detach().t().contiguous()
        self.out = self.o_proj.weight.detach().t().contiguous()
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj
        q_row = self.qkv.new_full((self.head_dim,), self.head_dim**-0.5)
        k_row = self.qkv.new_ones(self.head_dim)
        if self.qk_norm:
            q_row, k_row = q_row * self.q_norm.weight.detach(), self.k_norm.weight.detach()
            del self.q_norm, self.k_norm
        self.qk_scale = torch.cat((q_row.expand(self.heads, -1), k_row.expand(self.kv_heads, -1))).contiguous()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        rows, heads, kv_heads = x.shape[0], self.heads, self.kv_heads
        qkv = torch.mm(x, self.qkv).view(rows, heads + 2 * kv_heads, self.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.qk_norm:
            qk = rms(qk, self.eps)
        qk = rotate(qk * self.qk_scale, cos, sin)
        return torch.mm(attend(qk[:, :heads], qk[:, heads:], v), self.out)


class MLP(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.gate_up: Tensor
        self.down: Tensor

    def fuse(self) -> None:
        """After loading: gate and up as one matrix; both lie [in, out] as in Attention."""
        self.gate_up = torch.cat((self.gate_proj.weight, self.up_proj.weight)).detach().t().contiguous()
        self.down = self.down_proj.weight.detach().t().contiguous()
        del self.gate_proj, self.up_proj, self.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.mm(x, self.gate_up).chunk(2, -1)
        return torch.mm(F.silu(gate) * up, self.down)


class Layer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, qk_norm=True)
        self.mlp = MLP(config)
        self.input_layernorm = Norm(config.hidden, config.eps)
        self.post_attention_layernorm = Norm(config.hidden, config.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def fuse(module: nn.Module) -> None:
    """Run every part's `fuse` once the checkpoint's tensors are in place."""
    for part in list(module.modules()):
        fuse_part = getattr(part, "fuse", None)
        if callable(fuse_part):
            fuse_part()
