"""The codec decoder on a GPU: the next frames of a launch's slots become 16-bit samples, in place on the slots' state.

It computes what engine/model/codec.py does. Activations lie channels last; neighbouring linear maps without anything between them are
one matrix here, and Snake, GELU, bias and residual belong to the convolution before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.gpu.codec_weights import CodecWeights, pack
from engine.kernels.gpu.attention import attention, rope_write
from engine.kernels.gpu.codec import History, depthwise_norm, embed, load_history, save_history
from engine.kernels.gpu.conv import Columns, conv, conv_pcm
from engine.kernels.gpu.linear import linear_add, norm_gate_up, norm_linear_later
from engine.kernels.gpu.norm import rms_norm
from engine.model.codec import CodecDecoder


@dataclass(frozen=True)
class Rows:
    """A launch's frames, flattened: slot and position of each, [B * frames] int32."""

    slots: Tensor
    positions: Tensor


class GpuCodec:
    """State of `slots` slots, and a decoder for up to `most_frames` frames at once, in `dtype` (the decoder's if not given).

    `decoded` [slots] int32 counts each slot's frames and may belong to the caller; a slot where it is 0 is in its zero state. Of them
    `skipped` [slots] int32 came before the slot's codes begin: a clip that is spoken on from. No position reaches `positions`."""

    def __init__(
        self,
        decoder: CodecDecoder,
        slots: int,
        most_frames: int,
        *,
        decoded: Tensor | None = None,
        skipped: Tensor | None = None,
        positions: int = 8192,
        dtype: torch.dtype | None = None,
    ) -> None:
        tables = decoder.quantizer.tables
        self.config, self.most_frames, self.positions = decoder.config, most_frames, positions
        self.dtype, self.device = dtype or tables.dtype, tables.device
        self.weights: CodecWeights = pack(decoder, positions, self.dtype)
        self.history = History(self.weights.pieces, slots, self.dtype, self.device)
        body = self.config.body
        shape = (body.layers, slots, body.kv_heads, self.config.window - 1 + most_frames, body.head_dim)
        self.keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.values = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.decoded = decoded if decoded is not None else torch.zeros(slots, dtype=torch.int32, device=self.device)
        self.skipped = skipped if skipped is not None else torch.zeros_like(self.decoded)

    def reset(self, slots: list[int]) -> None:
        """These slots to their zero state: neither histories nor keys of nothing decoded are looked at."""
        for slot in slots:
            self.decoded[slot].zero_()

    def state(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """A copy of all that a slot remembers but its counts."""
        return self.history.state[slot].clone(), self.keys[:, slot].clone(), self.values[:, slot].clone()

    def put_state(self, slot: int, state: tuple[Tensor, Tensor, Tensor]) -> None:
        """Speech in `slot` goes on from where `state` was copied."""
        self.history.state[slot].copy_(state[0])
        self.keys[:, slot].copy_(state[1])
        self.values[:, slot].copy_(state[2])

    @torch.inference_mode()
    def decode(self, slots: Tensor, codes: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """Frames decoded[slot] - skipped[slot].. of codes [S, P, groups] int16, `frames` of each of `slots` [B] int32 -> samples [B, frames *
        samples_per_frame] int16, and [B] int32: 1 where one was not a number. Slots are distinct, but for the idle slot, whose state
        does not matter."""
        assert 0 < frames <= self.most_frames
        w, batch = self.weights, slots.shape[0]
        limit = min(self.positions, codes.shape[1])
        broken = torch.empty(batch, dtype=torch.int32, device=self.device)
        arena, buffers = self.history.arena(batch, frames)
        fronts = iter(buffers)
        load_history(self.history, arena, slots, self.decoded, frames)
        embedded = next(fronts)
        rows = Rows(*embed(codes, slots, self.decoded, self.skipped, w.tables, frames, embedded, broken))
        x = self._transformer(embedded, rows, batch, frames)
        x, columns = self._upsample(x, batch, frames, fronts)
        x, columns = self._blocks(x, batch, columns, fronts)
        pcm = torch.empty(batch, frames * self.config.samples_per_frame, dtype=torch.int16, device=self.device)
        conv_pcm(x, w.last, columns // w.last_group, pcm, broken)
        save_history(self.history, arena, slots, self.decoded, frames, limit)
        return pcm, broken

    def _transformer(self, embedded: Columns, rows: Rows, batch: int, frames: int) -> Columns:
        """Embedded frames -> normed hidden states."""
        w, config = self.weights, self.config
        eps = config.body.eps
        x = self._plain(batch * frames, config.body.hidden)
        conv(embedded, w.entry, frames, Columns(x.view(batch, -1)))
        for number, layer in enumerate(w.layers):
            keys, values = self.keys[number], self.values[number]
            qkv, undivided = norm_linear_later(x, eps, layer.qkv)
            scale = config.body.head_dim**-0.5
            q = rope_write(qkv, None, None, eps, w.cos, w.sin, rows.slots, rows.positions, keys, values, scale, undivided)
            x = linear_add(attention(q, rows.slots, rows.positions, keys, values, config.window), layer.out, x)
            x = linear_add(norm_gate_up(x, eps, layer.gate_up), layer.down, x)
        return Columns(rms_norm(x, w.norm, eps).view(batch, -1))

    def _upsample(self, x: Columns, batch: int, columns: int, fronts: Iterator[Columns]) -> tuple[Columns, int]:
        """Hidden states at frame rate -> the waveform decoder's input buffer."""
        latent = self.config.latent
        inner = next(fronts)
        for number, stage in enumerate(self.weights.stages):
            conv(x, stage.up, columns, inner)
            columns *= stage.ratio
            y = depthwise_norm(inner, stage.depthwise, stage.depthwise_bias, stage.eps, columns, self.dtype)
            wide = Columns(self._plain(batch, columns * stage.wide.outputs))
            conv(Columns(y.view(batch, -1)), stage.wide, columns, wide, gelu=True)
            last = number == len(self.weights.stages) - 1
            x = next(fronts) if last else Columns(self._plain(batch, columns * latent))
            conv(wide, stage.narrow, columns, x, residual=inner)
            inner = x if last else next(fronts)
        return x, columns

    def _blocks(self, x: Columns, batch: int, columns: int, fronts: Iterator[Columns]) -> tuple[Columns, int]:
        """The waveform decoder up to its last convolution, whose input buffer it fills."""
        w = self.weights
        entry, x = x, next(fronts)
        conv(entry, w.first, columns, x, snake=w.first_snake)
        for block in w.blocks:
            inner = next(fronts)
            raw = self._plain(batch * columns, block.up.outputs)
            conv(x, block.up, columns, inner, raw=raw, snake=block.up_snake)
            columns *= block.rate
            width = block.up.outputs // block.rate
            x = inner
            for number, unit in enumerate(block.units):
                y = Columns(self._plain(batch, columns * width))
                conv(x, unit.dilated, columns, y, snake=unit.middle)
                last = number == len(block.units) - 1
                x = next(fronts)
                conv(y, unit.pointwise, columns, x, residual=Columns(raw.view(batch, -1)), raw=None if last else raw, snake=unit.after)
        return x, columns

    def _plain(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
