"""The Code Predictor's attention against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.gpu.frame_attention import frame_attention, frame_attention_twin
from tests.engine.gpu.device import DEVICE, TYPES, close, random

SHAPES = [(4, 2, 16, 16), (16, 8, 128, 16), (2, 2, 32, 4), (6, 2, 16, 16)]
"""(query heads, kv heads, head_dim, capacity)."""
EPS = 1e-6


class Case:
    """A cache whose unwritten parts are poisoned."""

    def __init__(self, shape: tuple[int, int, int, int], rows: int, position: int, dtype: torch.dtype, inputs: int = 0) -> None:
        heads, groups, width, capacity = self.shape = shape
        self.rows, self.position = rows, position
        self.qkv = random(2 * rows if position == 0 else rows, (heads + 2 * groups) * width, dtype=dtype)
        self.undivided = 3 * random(len(self.qkv), inputs, dtype=dtype) if inputs else None
        self.norms = random(width, dtype=dtype), random(width, dtype=dtype)
        angle = torch.arange(capacity, device=DEVICE)[:, None] * torch.linspace(1, 0.01, width // 2, device=DEVICE)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.keys, self.values = (random(rows + 1, groups, capacity, width, dtype=dtype) for _ in range(2))
        for cache in (self.keys, self.values):
            cache[:, :, position:] = torch.nan

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, float, Tensor, Tensor, int, Tensor, Tensor, float, Tensor | None]:
        scale = self.shape[2] ** -0.5
        return (self.qkv, *self.norms, EPS, self.cos, self.sin, self.position, self.keys, self.values, scale, self.undivided)

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Attention, keys and values in float64, by plain loops."""
        heads, groups, width, _ = self.shape
        keys, values = self.keys.double(), self.values.double()
        qkv = self.qkv.double()
        if self.undivided is not None:
            qkv /= (self.undivided.double().square().mean(1, keepdim=True) + EPS).sqrt()
        lines = qkv.view(len(qkv), -1, width)
        out = torch.zeros(len(lines), heads, width, dtype=torch.float64, device=DEVICE)
        for number, line in enumerate(lines):
            at = number // self.rows if self.position == 0 else self.position
            place = number % self.rows
            for group in range(groups):
                keys[place, group, at] = self.turn(line[heads + group], 1, at)
                values[place, group, at] = line[heads + groups + group]
            for head in range(heads):
                group = head // (heads // groups)
                scores = keys[place, group, : at + 1] @ self.turn(line[head], 0, at) * width**-0.5
                out[number, head] = scores.softmax(0) @ values[place, group, : at + 1]
        return out.flatten(1), keys, values

    def turn(self, x: Tensor, norm: int, at: int) -> Tensor:
        x = x / (x.square().mean() + EPS).sqrt() * self.norms[norm].double()
        first, second = x.chunk(2)
        c, s = self.cos[at].double(), self.sin[at].double()
        return torch.cat((first * c - second * s, second * c + first * s))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [0, 72])
@pytest.mark.parametrize("position", [0, 2, 3])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_frame_attention(shape: tuple[int, int, int, int], rows: int, position: int, inputs: int, dtype: torch.dtype) -> None:
    for run in (frame_attention, frame_attention_twin):
        case = Case(shape, rows, position, dtype, inputs)
        out, keys, values = case.exact()
        close(run(*case.arguments()), out)
        close(case.keys, keys)
        close(case.values, values)


def test_neighbours_change_nothing() -> None:
    case = Case((4, 2, 16, 16), 3, 5, torch.bfloat16)
    first = frame_attention(*case.arguments())
    case.qkv[0] = torch.nan
    assert torch.equal(frame_attention(*case.arguments())[1:], first[1:])
