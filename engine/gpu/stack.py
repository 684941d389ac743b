"""A stack of transformer layers for a fixed number of rows, as Talker and Code Predictor have it: five kernels a layer, nothing read back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.kernels.gpu.attention import attention, decode_attention, rope_write
from engine.kernels.gpu.linear import linear_add, norm_gate_up, norm_linear
from engine.model.config import TransformerConfig
from engine.model.layers import Layer


@dataclass(frozen=True)
class LayerWeights:
    """Matrices lie [out, in]."""

    norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Stack:
    """`positions` is how long the rotary tables are."""

    def __init__(self, config: TransformerConfig, layers: nn.ModuleList, positions: int) -> None:
        self.config = config
        self.layers = [_pack(layer) for layer in layers if isinstance(layer, Layer)]
        self.scale = config.head_dim**-0.5
        self.cos, self.sin = rotary(config, positions, self.layers[0].norm.device)

    def run(self, x: Tensor, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor, *, one_row_a_slot: bool) -> Tensor:
        """Rows x [R, hidden] at `positions` [R] int32 of `slots` [R] int32 -> hidden states before the final norm [R, hidden]; x is used
        up. Keys and values [layers, slots, kv_heads, capacity, head_dim] are read and written. Rows of one slot see each other."""
        eps = self.config.eps
        for number, w in enumerate(self.layers):
            qkv = norm_linear(x, w.norm, eps, w.qkv)
            if one_row_a_slot:
                mixed = decode_attention(qkv, w.q_norm, w.k_norm, eps, self.cos, self.sin, slots, positions, keys[number], values[number], self.scale)
            else:
                q = rope_write(qkv, w.q_norm, w.k_norm, eps, self.cos, self.sin, slots, positions, keys[number], values[number], self.scale)
                mixed = attention(q, slots, positions, keys[number], values[number], None)
            x = linear_add(mixed, w.out, x)
            x = linear_add(norm_gate_up(x, w.post_norm, eps, w.gate_up), w.down, x)
        return x


def rotary(config: TransformerConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the half-split rotation, [positions, head_dim / 2] float32 each."""
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim)
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def _pack(layer: Layer) -> LayerWeights:
    """What `fuse` left of a layer, transposed back: a GPU reads a weight row by row. The softmax scale lies in q's row of qk_scale and is
    taken out again, as the attention kernel brings it."""
    attention_part, mlp = layer.self_attn, layer.mlp
    q_norm = attention_part.qk_scale[0].float() * attention_part.head_dim**0.5
    return LayerWeights(
        norm=layer.input_layernorm.weight.detach(),
        qkv=attention_part.qkv.t().contiguous(),
        q_norm=q_norm.to(attention_part.qkv.dtype),
        k_norm=attention_part.qk_scale[-1].contiguous(),
        out=attention_part.out.t().contiguous(),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=mlp.gate_up.t().contiguous(),
        down=mlp.down.t().contiguous(),
    )
