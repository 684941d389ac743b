"""The speaker encoder of Base checkpoints: a clip's mel spectrogram in, one vector of Talker width out (reference, section 11).

ECAPA-TDNN (Desplanques, Thienpondt, Demuynck 2020) without batch norms. Every convolution pads "same" by reflection."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import SpeakerEncoderConfig

FFT = 1024
HOP = 256
LOWEST = 1e-5
"""Mel values below this count as this before the logarithm."""


def mel_spectrogram(samples: Tensor, sample_rate: int, mels: int) -> Tensor:
    """Samples [N] in [-1, 1] -> natural-log mel magnitudes [mels, (N - 256) // 256 + 1]."""
    edge = (FFT - HOP) // 2
    padded = F.pad(samples[None, None], (edge, edge), mode="reflect")[0, 0]
    spectrum = torch.stft(padded, FFT, HOP, window=torch.hann_window(FFT), center=False, return_complex=True)
    magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
    return (_mel_filters(sample_rate, mels) @ magnitude).clamp(min=LOWEST).log()


def _mel_filters(sample_rate: int, mels: int) -> Tensor:
    """Triangular filters [mels, FFT / 2 + 1] from 0 Hz to half the rate on Slaney's scale, each of unit area."""
    top = sample_rate / 2
    edges = _slaney_to_hz(np.linspace(0.0, _hz_to_slaney(top), mels + 2))
    bins = np.linspace(0.0, top, FFT // 2 + 1)
    slopes = edges[:, None] - bins
    width = np.diff(edges)[:, None]
    rising, falling = -slopes[:-2] / width[:-1], slopes[2:] / width[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(filters.astype(np.float32))


# Slaney's scale: linear below 1 kHz (3 mel for 200 Hz), then 27 mel for each factor of 6.4 (Auditory Toolbox, 1998).
_LINEAR_HZ = 200.0 / 3
_BREAK_MEL = 1000.0 / _LINEAR_HZ
_LOG_STEP = np.log(6.4) / 27


def _hz_to_slaney(hz: float) -> float:
    """Of a frequency above 1 kHz."""
    return float(_BREAK_MEL + np.log(hz / 1000.0) / _LOG_STEP)


def _slaney_to_hz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < _BREAK_MEL, mel * _LINEAR_HZ, 1000.0 * np.exp(_LOG_STEP * (mel - _BREAK_MEL)))


class Conv(nn.Module):
    """A bare convolution under the name the checkpoint gives it."""

    def __init__(self, c_in: int, c_out: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.edge = dilation * (kernel - 1) // 2
        self.conv = nn.Conv1d(c_in, c_out, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        """x [1, c_in, T] -> ReLU of [1, c_out, T]."""
        return F.relu(self.conv(F.pad(x, (self.edge, self.edge), mode="reflect")))


class Res2Net(nn.Module):
    """The channels in `scale` splits: the first passes, each later one is convolved together with the output before it."""

    def __init__(self, channels: int, kernel: int, dilation: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.blocks = nn.ModuleList(Conv(channels // scale, channels // scale, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        first, *splits = x.chunk(self.scale, 1)
        done = [first]
        for number, (split, block) in enumerate(zip(splits, self.blocks, strict=True)):
            done.append(block(split if number == 0 else split + done[-1]))
        return torch.cat(done, 1)


class SqueezeExcitation(nn.Module):
    """Scales each channel by what the channels' means over time say."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, squeezed, 1)
        self.conv2 = nn.Conv1d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv2(F.relu(self.conv1(x.mean(2, keepdim=True)))))


class Block(nn.Module):
    """x + SE(conv(Res2Net(conv(x))))."""

    def __init__(self, channels: int, kernel: int, dilation: int, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        self.tdnn1 = Conv(channels, channels, 1)
        self.res2net_block = Res2Net(channels, kernel, dilation, config.scale)
        self.tdnn2 = Conv(channels, channels, 1)
        self.se_block = SqueezeExcitation(channels, config.squeezed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))


class AttentivePooling(nn.Module):
    """[1, C, T] -> [1, 2C, 1]: mean and standard deviation over time, weighted by attention of each channel."""

    def __init__(self, channels: int, attention: int) -> None:
        super().__init__()
        self.tdnn = Conv(3 * channels, attention, 1)
        self.conv = nn.Conv1d(attention, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        context = [part.expand_as(x) for part in _moments(x, torch.full_like(x, 1.0 / x.shape[2]))]
        weights = self.conv(torch.tanh(self.tdnn(torch.cat((x, *context), 1)))).softmax(2)
        return torch.cat(_moments(x, weights), 1)


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over time of x [1, C, T], [1, C, 1] each; the weights of a channel sum to 1."""
    mean = (weights * x).sum(2, keepdim=True)
    return mean, (weights * (x - mean).square()).sum(2, keepdim=True).clamp(min=1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """Parameter names are the checkpoint's, below `speaker_encoder.`"""

    def __init__(self, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        self.config = config
        channels, kernels, dilations = config.channels, config.kernels, config.dilations
        middle = range(1, len(channels) - 1)
        self.blocks = nn.ModuleList(
            [
                Conv(config.mels, channels[0], kernels[0], dilations[0]),
                *(Block(channels[number], kernels[number], dilations[number], config) for number in middle),
            ]
        )
        self.mfa = Conv(sum(channels[number] for number in middle), channels[-1], kernels[-1], dilations[-1])
        self.asp = AttentivePooling(channels[-1], config.attention)
        self.fc = nn.Conv1d(2 * channels[-1], config.width, 1)

    def forward(self, mel: Tensor) -> Tensor:
        """Log mel [mels, T] -> speaker vector [width]; not normalized, it goes into the prompt as it is."""
        x = mel[None]
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        vector: Tensor = self.fc(self.asp(self.mfa(torch.cat(outputs[1:], 1))))
        return vector[0, :, 0]
