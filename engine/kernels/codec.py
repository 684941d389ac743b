"""The codec decoder's kernel: structures of codec.c as ctypes, filled from a loaded decoder. Twin: model/codec.py."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.kernels.native import Arena, CMatrix, checked, pointer

if TYPE_CHECKING:
    from engine.model.codec import CausalConv, CausalUpsample, CodecDecoder, ConvNeXt, ResidualUnit, Snake, UpsampleBlock


class CConv(ctypes.Structure):
    _fields_ = [("matrix", CMatrix), ("bias", c_void_p), *((name, c_int32) for name in ("c_in", "c_out", "taps", "dilation", "state", "unused"))]


class CUpsample(ctypes.Structure):
    _fields_ = [
        ("now", CMatrix),
        ("later", CMatrix),
        ("bias", c_void_p),
        *((name, c_int32) for name in ("c_in", "c_out", "stride", "overlaps", "state", "unused")),
    ]


class CSnake(ctypes.Structure):
    _fields_ = [("frequency", c_void_p), ("depth", c_void_p), ("period", c_int64)]


class CUnit(ctypes.Structure):
    _fields_ = [("first", CSnake), ("second", CSnake), ("dilated", CConv), ("pointwise", CConv)]


class CBlock(ctypes.Structure):
    _fields_ = [("snake", CSnake), ("up", CUpsample), ("units", CUnit * 3)]


class CWiden(ctypes.Structure):
    _fields_ = [
        ("up", CUpsample),
        *((name, c_void_p) for name in ("depthwise", "depthwise_bias", "norm_weight", "norm_bias", "bias_1", "bias_2", "gamma")),
        ("pointwise_1", CMatrix),
        ("pointwise_2", CMatrix),
        ("taps", c_int32),
        ("state", c_int32),
        ("eps", c_float),
        ("unused", c_int32),
    ]


class CCodec(ctypes.Structure):
    _fields_ = [
        ("tables", c_void_p),
        ("projection", CMatrix),
        ("entry", CConv),
        ("input", CMatrix),
        ("output", CMatrix),
        *((name, c_void_p) for name in ("input_bias", "output_bias", "frequency", "stack", "cache", "widen")),
        ("body", CConv),
        ("blocks", c_void_p),
        ("last_snake", CSnake),
        ("last", CConv),
        *((name, c_int32) for name in ("groups", "codebook", "half", "latent", "window", "widens", "block_count", "unused")),
    ]


class CodecKernel:
    """Decodes in place on the state of slots."""

    def __init__(self, lib: ctypes.CDLL, decoder: CodecDecoder) -> None:
        self._arena = Arena(lib)
        self._decode = lib.decode
        a, config = self._arena, decoder.config
        # The parts of a ModuleList have no static types.
        transformer: Any = decoder.pre_transformer
        pairs: Any = decoder.upsample
        chain: Any = decoder.decoder
        layers, cache = [], []
        for layer in transformer.layers:
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            layers.append(a.layer(layer.self_attn, layer.mlp, norms, (layer.self_attn_layer_scale.scale, layer.mlp_layer_scale.scale)))
            cache += [layer.keys, layer.values]
        body = config.body
        # As in `rope`, so that the angles are the same floats.
        frequency = 1.0 / body.rope_theta ** (torch.arange(0, body.head_dim, 2, dtype=torch.float32) / body.head_dim)
        widens = [self._widen(up, convnext) for up, convnext in pairs]
        first, *blocks, snake, last = chain
        quantizer = decoder.quantizer
        self._codec = a.keep(
            CCodec(
                tables=a.vector(quantizer.tables),
                projection=a.matrix(quantizer.projection.t()),
                entry=self._conv(decoder.pre_conv),
                input=a.matrix(transformer.input_proj.weight.t()),
                output=a.matrix(transformer.output_proj.weight.t()),
                input_bias=a.vector(transformer.input_proj.bias),
                output_bias=a.vector(transformer.output_proj.bias),
                frequency=a.vector(frequency),
                stack=a.stack(body, layers, transformer.norm, qk_norm=False),
                cache=a.keep((c_int32 * len(cache))(*cache)),
                widen=a.keep((CWiden * len(widens))(*widens)),
                body=self._conv(first),
                blocks=a.keep((CBlock * len(blocks))(*(self._block(block) for block in blocks))),
                last_snake=self._snake(snake),
                last=self._conv(last),
                groups=config.groups,
                codebook=config.codebook_size,
                half=quantizer.tables.shape[1],
                latent=config.latent,
                window=config.window,
                widens=len(widens),
                block_count=len(blocks),
            )
        )
        self._samples_per_frame, self._codebook = config.samples_per_frame, config.codebook_size

    def decode(self, codes: Tensor, slots: list[int], parts: list[Tensor], frames_done: Tensor) -> Tensor:
        """Codes [B, n, groups] of the rows in `slots` -> samples [B, n * samples_per_frame]; parts[i][slot] and frames_done[slot] move on."""
        codes = codes.contiguous()
        rows, frames, _ = codes.shape
        if not (int(codes.min()) >= 0 and int(codes.max()) < self._codebook and min(slots) >= 0 and max(slots) < len(frames_done)):
            raise IndexError(f"codes must lie in 0..{self._codebook - 1} and slots {slots} below {len(frames_done)}")
        samples = torch.empty(rows, frames * self._samples_per_frame)
        pointers = (c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        strides = (c_int64 * len(parts))(*(part.stride(0) for part in parts))
        where = (c_int64 * rows)(*slots), pointers, strides, pointer(frames_done)
        checked(self._decode(c_void_p(self._codec), c_int64(rows), c_int64(frames), pointer(codes), *where, pointer(samples)))
        return samples

    def _conv(self, conv: CausalConv, *, small: bool = True) -> CConv:
        weight, own = conv.conv.weight, conv.conv
        c_out, c_in, taps = weight.shape
        matrix = self._arena.matrix(weight.permute(2, 1, 0).reshape(taps * c_in, c_out), small=small)
        return CConv(matrix, self._arena.vector(own.bias), c_in, c_out, taps, own.dilation[0], conv.index, 0)

    def _upsample(self, up: CausalUpsample, *, small: bool = True) -> CUpsample:
        c_in, c_out, kernel = up.conv.weight.shape
        stride = up.conv.stride[0]
        assert kernel in (stride, 2 * stride) and up.conv.bias is not None
        by_column = up.conv.weight.permute(0, 2, 1)
        now = self._arena.matrix(by_column[:, :stride].reshape(c_in, stride * c_out), small=small)
        later = self._arena.matrix(by_column[:, stride:].reshape(c_in, stride * c_out), small=small) if up.overlap else CMatrix()
        return CUpsample(now, later, self._arena.vector(up.conv.bias.repeat(stride)), c_in, c_out, stride, int(up.overlap > 0), up.index, 0)

    def _snake(self, snake: Snake) -> CSnake:
        channels, lanes = len(snake.frequency), int(self._arena.lib.lanes())
        times = lanes // math.gcd(channels, lanes)
        repeated = (self._arena.vector(values.flatten().repeat(times)) for values in (snake.frequency, snake.depth))
        return CSnake(*repeated, channels * times)

    def _unit(self, unit: ResidualUnit) -> CUnit:
        return CUnit(self._snake(unit.act1), self._snake(unit.act2), self._conv(unit.conv1, small=False), self._conv(unit.conv2, small=False))

    def _block(self, block: UpsampleBlock) -> CBlock:
        parts: Any = block.block
        snake, up, *units = parts
        return CBlock(self._snake(snake), self._upsample(up, small=False), (CUnit * 3)(*(self._unit(unit) for unit in units)))

    def _widen(self, up: CausalUpsample, convnext: ConvNeXt) -> CWiden:
        a, n, depthwise = self._arena, convnext, convnext.dwconv.conv
        return CWiden(
            self._upsample(up),
            *(a.vector(values) for values in (depthwise.weight[:, 0].t(), depthwise.bias, n.norm.weight, n.norm.bias)),
            *(a.vector(values) for values in (n.pwconv1.bias, n.pwconv2.bias, n.gamma)),
            a.matrix(n.pwconv1.weight.t()),
            a.matrix(n.pwconv2.weight.t()),
            depthwise.weight.shape[2],
            n.dwconv.index,
            n.norm.eps,
            0,
        )
