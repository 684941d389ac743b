"""The convolution kernel against torch's own convolutions in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.gpu.codec_weights import Packer
from engine.kernels.gpu.conv import Columns, Convolution, Snake, Tiling, conv, conv_pcm
from tests.engine.gpu.device import DEVICE, TYPES, close, random

CASES = [
    # batch, columns, in, out, taps, dilation
    (1, 1, 8, 8, 1, 1),
    (3, 5, 24, 40, 7, 3),
    (2, 9, 6, 10, 7, 9),
    (2, 20, 32, 17, 3, 1),
    (1, 2, 96, 48, 2, 1),
]


def history_of(x: Tensor, conv: Convolution) -> Columns:
    """x [B, history + columns, C] as a buffer."""
    return Columns(x.reshape(x.shape[0], -1).contiguous(), conv.history)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("batch", "columns", "channels", "outputs", "taps", "dilation"), CASES)
def test_bias_residual_and_snake(dtype: torch.dtype, batch: int, columns: int, channels: int, outputs: int, taps: int, dilation: int) -> None:
    packed = Packer(dtype).conv(random(outputs, channels, taps) / (channels * taps) ** 0.5, random(outputs), dilation)
    x = random(batch, dilation * (taps - 1) + columns, channels, dtype=dtype)
    residual, raw = random(batch, columns * outputs + 3, dtype=dtype), torch.empty(batch * columns, outputs, dtype=dtype, device=DEVICE)
    snake = Snake(random(outputs), random(outputs))
    front = 2 * outputs
    out = torch.full((batch, front + columns * outputs), torch.nan, dtype=dtype, device=DEVICE)
    conv(history_of(x, packed), packed, columns, Columns(out, front), residual=Columns(residual, 3), raw=raw, snake=snake)
    weight = packed.weight.double().unflatten(1, (taps, channels)).transpose(1, 2)
    y = F.conv1d(x.double().transpose(1, 2), weight, packed.bias.double(), dilation=dilation).transpose(1, 2)
    y = y + residual[:, 3:].double().view(y.shape)
    close(raw.view(y.shape), y)
    wave = torch.sin(torch.pi * snake.frequency.double() * y)
    close(out[:, front:].view(y.shape), y + snake.depth.double() * wave.square())
    assert out[:, :front].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_gelu_and_a_residual_that_is_overwritten(dtype: torch.dtype) -> None:
    packed = Packer(dtype).linear(random(40, 24) / 5, random(40))
    x, sums = random(6, 24, dtype=dtype), random(6, 40, dtype=dtype)
    exact = F.linear(x.double(), packed.weight.double(), packed.bias.double())
    wide = torch.empty(2, 3 * 40, dtype=dtype, device=DEVICE)
    conv(Columns(x.view(2, -1)), packed, 3, Columns(wide), gelu=True)
    close(wide.view(6, 40), F.gelu(exact))
    exact = exact + sums.double()
    conv(Columns(x.view(2, -1)), packed, 3, Columns(wide), residual=Columns(sums.view(2, -1)), raw=sums)
    close(wide.view(6, 40), exact)
    assert torch.equal(wide.view(6, 40), sums)


@pytest.mark.parametrize("overlap", [False, True])
def test_transposed_convolution(overlap: bool) -> None:
    rate, own = 3, torch.nn.ConvTranspose1d(10, 14, 6 if overlap else 3, 3).to(DEVICE).requires_grad_(False)
    packed = Packer(torch.float32).upsample(own)
    x = random(2, 5, 10)
    exact = own.double()(x.double().transpose(1, 2)).transpose(1, 2)[:, : 5 * rate]
    before = torch.zeros(2, int(overlap), 10, device=DEVICE)
    out = torch.empty(2, 5 * rate * 14, device=DEVICE)
    conv(history_of(torch.cat((before, x), 1), packed), packed, 5, Columns(out))
    close(out.view(exact.shape), exact)


@pytest.mark.parametrize("dtype", TYPES)
def test_samples(dtype: torch.dtype) -> None:
    """Clamped, rounded half to even; what is not a number is named and becomes silence."""
    group = 4
    own = torch.nn.Conv1d(6, 1, 7).to(DEVICE).requires_grad_(False)
    packed = Packer(dtype).grouped(own, group)
    x = random(3, 6 + 12, 6, dtype=dtype) * 2
    x[1, 9, 0] = torch.inf
    pcm, broken = torch.empty(3, 12, dtype=torch.int16, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    conv_pcm(history_of(x, packed), packed, 12 // group, pcm, broken)
    assert broken.tolist() == [0, 1, 0]
    weight = own.weight.to(dtype).double()
    exact = F.conv1d(x.double().transpose(1, 2), weight, own.bias.double())[:, 0].clamp(-1, 1) * 32767
    assert (pcm[::2] - exact[::2]).abs().max() <= 0.5 + 0.02
    assert exact.abs().max() == 32767


def test_every_tiling_gives_the_same() -> None:
    packed = Packer(torch.bfloat16).conv(random(48, 96, 3) / 17, random(48))
    x = history_of(random(2, 2 + 21, 96, dtype=torch.bfloat16), packed)
    outs = []
    for tile in (Tiling(16, 16, 256, 4, 4), Tiling(32, 32, 64, 4, 5), Tiling(128, 128, 32, 8, 4)):
        out = torch.empty(2, 21 * 48, dtype=torch.bfloat16, device=DEVICE)
        conv(x, packed, 21, Columns(out), tile=tile)
        outs.append(out)
    for out in outs[1:]:
        close(out, outs[0].double())
