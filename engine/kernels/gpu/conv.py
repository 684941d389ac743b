"""Causal convolutions, channels last, with bias, residual and activation in one pass.

The columns before the first new one lie in the same buffer as the new ones (`Columns`), so a convolution knows no history. A kernel of
one tap is a linear layer; a transposed convolution of kernel 2r and stride r is a convolution of two taps with r times the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import gpu


@dataclass(frozen=True)
class Columns:
    """`data` [B, row] contiguous: `first` elements of history, then the new columns, each of its channels side by side."""

    data: Tensor
    first: int = 0


@dataclass(frozen=True)
class Convolution:
    """y[b, t] = bias + sum over taps j: weight[:, j] . x[b, first - history + t * step + j * tap : + channels], all counted in elements.

    weight [outputs, taps * channels], bias [outputs] float32."""

    weight: Tensor
    bias: Tensor
    channels: int
    taps: int
    tap: int
    step: int
    history: int

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True)
class Snake:
    """x + depth * sin^2(pi * x * frequency); both [outputs] float32."""

    frequency: Tensor
    depth: Tensor


@dataclass(frozen=True)
class Tiling:
    """A program's rows, outputs and inputs at a time; how many warps it has and how many loads are in flight."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


EXACT = Tiling(32, 32, 32, 4, 2)
"""float32 is for comparisons: one size serves all."""


def tiling(conv: Convolution, rows: int) -> Tiling:
    """Few rows: the weights' way from memory counts, so many programs with much in flight. Many rows: the tensor cores."""
    if conv.weight.dtype != torch.bfloat16:
        return EXACT
    if rows <= 16:
        return Tiling(16, 16, 256, 4, 4)
    if rows <= 1024:
        return Tiling(32, 32, 64, 4, 5)
    if conv.outputs <= 16:
        return Tiling(128, 16, 64, 4, 4)
    if conv.channels % 64:
        return Tiling(128, 128, 32, 8, 4)
    if rows <= 8192 or conv.outputs % 128:
        return Tiling(128, 64, 64, 4, 4)
    return Tiling(128, 128, 64, 8, 4)


def launch_options() -> dict[str, bool]:
    """Of a kernel with a PDL constant."""
    return {"PDL": True, "launch_pdl": True} if gpu.PDL else {"PDL": False}


def conv(
    x: Columns,
    conv: Convolution,
    columns: int,
    out: Columns,
    *,
    residual: Columns | None = None,
    raw: Tensor | None = None,
    snake: Snake | None = None,
    gelu: bool = False,
    tile: Tiling | None = None,
) -> None:
    """Writes act(y + residual) of `columns` new columns a row to `out`, and to `raw` [B * columns, outputs] the same before its
    activation; act is Snake, GELU or nothing. `raw` may be the residual itself."""
    if not gpu.by_kernel(x.data):
        return conv_twin(x, conv, columns, out, residual=residual, raw=raw, snake=snake, gelu=gelu)
    from engine.kernels.gpu.conv_kernel import GELU, NONE, SNAKE

    act = SNAKE.value if snake is not None else GELU.value if gelu else NONE.value
    _launch(x, conv, columns, out, residual, raw, snake, None, act, tile)


def conv_twin(
    x: Columns,
    conv: Convolution,
    columns: int,
    out: Columns,
    *,
    residual: Columns | None = None,
    raw: Tensor | None = None,
    snake: Snake | None = None,
    gelu: bool = False,
) -> None:
    y = _sums(x, conv, columns)
    if residual is not None:
        y = y + _new(residual, columns, conv.outputs).to(y.dtype)
    if raw is not None:
        raw.view(y.shape).copy_(y)
    if snake is not None:
        y = y + snake.depth.to(y.dtype) * torch.sin(y * snake.frequency.to(y.dtype) * torch.pi).square()
    if gelu:
        y = F.gelu(y)
    _new(out, columns, conv.outputs).copy_(y)


def conv_pcm(x: Columns, conv: Convolution, columns: int, pcm: Tensor, broken: Tensor, *, tile: Tiling | None = None) -> None:
    """y clamped to [-1, 1] as 16-bit samples into `pcm` [B, columns * outputs] int16; broken[b] (int32) becomes 1 where a sample of row
    b is not a number, and such a sample 0."""
    if not gpu.by_kernel(x.data):
        return conv_pcm_twin(x, conv, columns, pcm, broken)
    from engine.kernels.gpu.conv_kernel import PCM

    _launch(x, conv, columns, Columns(pcm), None, None, None, broken, PCM.value, tile)


def conv_pcm_twin(x: Columns, conv: Convolution, columns: int, pcm: Tensor, broken: Tensor) -> None:
    y = _sums(x, conv, columns)
    finite = y.isfinite()
    broken.masked_fill_(~finite.flatten(1).all(1), 1)
    samples = torch.where(finite, y, torch.zeros_like(y)).clamp(-1.0, 1.0) * 32767.0
    pcm.copy_(samples.round().to(torch.int16).view(pcm.shape))


def _sums(x: Columns, conv: Convolution, columns: int) -> Tensor:
    """[B, columns, outputs] in float32, or float64 for such weights."""
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    batch, row = x.data.shape
    first = x.data.storage_offset() + x.first - conv.history
    inputs = x.data.as_strided((batch, columns, conv.taps, conv.channels), (row, conv.step, conv.tap, 1), first)
    return F.linear(inputs.flatten(2).to(wide), conv.weight.to(wide), conv.bias.to(wide))


def _new(columns: Columns, count: int, width: int) -> Tensor:
    """The new columns [B, count, width], a view."""
    return columns.data[:, columns.first : columns.first + count * width].view(-1, count, width)


def _launch(
    x: Columns,
    conv: Convolution,
    columns: int,
    out: Columns,
    residual: Columns | None,
    raw: Tensor | None,
    snake: Snake | None,
    broken: Tensor | None,
    act: int,
    tile: Tiling | None,
) -> None:
    from engine.kernels.gpu.conv_kernel import conv_kernel

    rows = x.data.shape[0] * columns
    tile = tile or tiling(conv, rows)
    frequency, depth = (snake.frequency, snake.depth) if snake else (conv.bias, conv.bias)
    added = residual or out
    programs = -(-rows // tile.rows) * -(-conv.outputs // tile.outputs)
    kernel: Any = conv_kernel
    kernel[(programs,)](
        x.data,
        conv.weight,
        conv.bias,
        frequency,
        depth,
        added.data,
        out.data if raw is None else raw,
        out.data,
        out.data if broken is None else broken,
        rows,
        columns,
        conv.channels,
        conv.outputs,
        conv.taps,
        x.data.shape[1],
        x.first - conv.history,
        conv.step,
        conv.tap,
        added.data.shape[1],
        added.first,
        out.data.shape[1],
        out.first,
        int(residual is not None),
        int(raw is not None),
        ACT=act,
        PRECISION="ieee",
        WHOLE=conv.channels % tile.inputs == 0,
        BM=tile.rows,
        BN=tile.outputs,
        BK=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(),
    )
