"""The Talker: one transformer step a row; a frame's summed embeddings and a text token in, codebook-0 logits and a hidden state out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.native import StackKernel, loaded
from engine.model.config import TalkerConfig
from engine.model.layers import Attend, Layer, Norm, rope


@dataclass(frozen=True)
class Span:
    """`rows` consecutive positions of one slot, from position `start`: one row is a decode step, more a prefill."""

    slot: int
    start: int
    rows: int = 1


class KVCache:
    """Keys and values of every slot, [layers, slots, kv_heads, positions, head_dim] each. Zero pages cost nothing until written."""

    def __init__(self, config: TalkerConfig, slots: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        body = config.body
        shape = (body.layers, slots, body.kv_heads, positions, body.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = positions

    def attend(self, layer: int, spans: list[Span]) -> Attend:
        """Attention of one layer: writes the spans' keys and values, then each span's queries see their own slot up to themselves.

        Span by span, so that a row's result does not depend on its neighbours' lengths."""
        keys, values = self.keys[layer], self.values[layer]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads, head_dim = q.shape[1:]
            kv_heads = k.shape[1]
            out = torch.empty(q.shape[0], heads * head_dim, dtype=q.dtype, device=q.device)
            row = 0
            for span in spans:
                stop, end = row + span.rows, span.start + span.rows
                own_keys, own_values = keys[span.slot, :, :end], values[span.slot, :, :end]
                own_keys[:, span.start :] = k[row:stop].transpose(0, 1)
                own_values[:, span.start :] = v[row:stop].transpose(0, 1)
                if span.rows == 1:
                    scores = torch.matmul(q[row].view(kv_heads, -1, head_dim), own_keys.transpose(1, 2))
                    out[row] = torch.matmul(scores.softmax(-1), own_values).view(-1)
                else:
                    mask = torch.ones(span.rows, end, dtype=torch.bool, device=q.device).tril(span.start)
                    mixed = F.scaled_dot_product_attention(
                        q[None, row:stop].transpose(1, 2), own_keys[None], own_values[None], attn_mask=mask, scale=1.0, enable_gqa=True
                    )
                    out[row:stop] = mixed[0].transpose(0, 1).reshape(span.rows, -1)
                row = stop
            return out

        return run


class TextProjection(nn.Module):
    """T(x) = fc2(SiLU(fc1(x))): text embedding width to Talker width."""

    def __init__(self, text_hidden: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(text_hidden, text_hidden)
        self.linear_fc2 = nn.Linear(text_hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class TalkerBody(nn.Module):
    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.text_embedding = nn.Embedding(config.text_vocab, config.text_hidden)
        self.codec_embedding = nn.Embedding(config.vocab, config.body.hidden)
        self.layers = nn.ModuleList(Layer(config.body) for _ in range(config.body.layers))
        self.norm = Norm(config.body.hidden, config.body.eps)


class Talker(nn.Module):
    """Parameter names are the checkpoint's, below `talker.`"""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.config = config
        self.model = TalkerBody(config)
        self.text_projection = TextProjection(config.text_hidden, config.body.hidden)
        self.codec_head = nn.Linear(config.body.hidden, config.vocab, bias=False)
        self.cos: Tensor
        self.sin: Tensor
        self.kernel: StackKernel | None = None
        self.watch: Callable[[Tensor], None] | None = None
        """Sees the input of each layer and the final hidden states [N, hidden]: conform listens here."""

    def prepare(self, positions: int) -> None:
        """Rotary tables for `positions` positions, on the weights' device and dtype, and the kernel where there is one."""
        weight = self.codec_head.weight
        body = self.config.body
        self.cos, self.sin = rope(torch.arange(positions, device=weight.device), body.head_dim, body.rope_theta, weight.dtype)
        lib = loaded(weight)
        self.kernel = StackKernel(lib, body, list(self.model.layers), self.model.norm) if lib else None

    def text(self, ids: Tensor) -> Tensor:
        """Text ids [N] -> rows of Talker width [N, hidden]."""
        projected: Tensor = self.text_projection(self.model.text_embedding(ids))
        return projected

    def forward(self, x: Tensor, spans: list[Span], cache: KVCache) -> Tensor:
        """Input rows x [N, hidden], laid out span after span -> final (post-norm) hidden states [N, hidden]."""
        if self.kernel is not None:
            slots = [span.slot for span in spans for _ in range(span.rows)]
            places = [place for span in spans for place in range(span.start, span.start + span.rows)]
            return self.kernel.run(x, self.cos, self.sin, (slots, places), cache.keys, cache.values, self.watch)
        if all(span.rows == 1 for span in spans):
            positions = torch.tensor([span.start for span in spans], device=x.device)
        else:
            positions = torch.cat([torch.arange(span.start, span.start + span.rows, device=x.device) for span in spans])
        cos, sin = self.cos[positions], self.sin[positions]
        watch = self.watch or (lambda _: None)
        for number, layer in enumerate(self.model.layers):
            watch(x)
            x = layer(x, cos, sin, cache.attend(number, spans))
        hidden: Tensor = self.model.norm(x)
        watch(hidden)
        return hidden
