"""A stack of transformer layers for a fixed number of rows, as Talker and Code Predictor have it: five kernels a layer, nothing read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.kernels.gpu.linear import linear_add, norm_gate_up, norm_linear_later
from engine.model.config import TransformerConfig
from engine.model.layers import Layer


@dataclass(frozen=True)
class LayerWeights:
    """Matrices lie [out, in]; the norms' weights are multiplied into those behind them."""

    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


Attend = Callable[[int, LayerWeights, Tensor, Tensor | None], Tensor]
"""(a layer's number, its weights, qkv [R, (H + 2 G) * D], rows [R, hidden] by whose root mean square that is still to be divided, if any)
-> [R, H * D], the layer's cache read and written."""


class Stack:
    """`positions` is how long the rotary tables are."""

    def __init__(self, config: TransformerConfig, layers: nn.ModuleList, positions: int) -> None:
        self.config = config
        self.layers = [_pack(layer) for layer in layers if isinstance(layer, Layer)]
        self.scale = config.head_dim**-0.5
        self.cos, self.sin = rotary(config, positions, self.layers[0].qkv.device)

    def run(self, x: Tensor, attend: Attend, wanted: int = 0) -> Tensor:
        """Rows x [R, hidden] -> hidden states before the final norm [R - wanted, hidden], of rows `wanted` on; x is used up."""
        eps = self.config.eps
        for number, w in enumerate(self.layers):
            mixed = attend(number, w, *norm_linear_later(x, eps, w.qkv))
            if number == len(self.layers) - 1:
                mixed, x = mixed[wanted:], x[wanted:]
            x = linear_add(mixed, w.out, x)
            x = linear_add(norm_gate_up(x, eps, w.gate_up), w.down, x)
        return x


def rotary(config: TransformerConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the half-split rotation, [positions, head_dim / 2] float32 each."""
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim)
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def with_norm(weight: Tensor, norm: Tensor) -> Tensor:
    """A matrix [out, in] that takes what is divided by its root mean square only: the norm's weight [in] in its columns."""
    return (weight.float() * norm.float()).to(weight.dtype).contiguous()


def _pack(layer: Layer) -> LayerWeights:
    """What `fuse` left of a layer, transposed back: a GPU reads a weight row by row. The softmax scale lies in q's row of qk_scale and is
    taken out again, as the attention kernel brings it."""
    attention_part, mlp = layer.self_attn, layer.mlp
    q_norm = attention_part.qk_scale[0].float() * attention_part.head_dim**0.5
    return LayerWeights(
        qkv=with_norm(attention_part.qkv.detach().t(), layer.input_layernorm.weight.detach()),
        q_norm=q_norm.to(attention_part.qkv.dtype),
        k_norm=attention_part.qk_scale[-1].contiguous(),
        out=attention_part.out.t().contiguous(),
        gate_up=with_norm(mlp.gate_up.detach().t(), layer.post_attention_layernorm.weight.detach()),
        down=mlp.down.t().contiguous(),
    )
