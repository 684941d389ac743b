"""Rotary embedding, cache and attention kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.gpu.attention import attention, attention_twin, decode_attention, decode_attention_twin, rope_write, rope_write_twin
from tests.engine.gpu.device import DEVICE, TYPES, close, random

SHAPES = [(4, 2, 16, 16), (4, 4, 32, 40), (2, 1, 128, 130), (8, 1, 16, 7)]
"""(query heads, kv heads, head_dim, capacity)."""


class Case:
    """Rows at chosen places of a cache whose unwritten parts are poisoned, and what float64 makes of them."""

    def __init__(
        self,
        heads: int,
        groups: int,
        width: int,
        capacity: int,
        dtype: torch.dtype,
        positions: list[int],
        slots: list[int],
        norm: bool,
        inputs: int = 0,
    ) -> None:
        rows = len(slots)
        self.slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        self.positions = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
        self.qkv = random(rows, (heads + 2 * groups) * width, dtype=dtype)
        self.undivided = 3 * random(rows, inputs, dtype=dtype) if inputs else None
        self.q_norm, self.k_norm = (random(width, dtype=dtype), random(width, dtype=dtype)) if norm else (None, None)
        angle = torch.arange(96, device=DEVICE)[:, None] * torch.linspace(1, 0.01, width // 2, device=DEVICE)
        self.cos, self.sin = angle.cos(), angle.sin()
        shape = (max(slots) + 2, groups, capacity, width)
        self.keys, self.values = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
        for slot, position in zip(slots, positions, strict=True):
            self.keys[slot, :, position + 1 :] = torch.nan
            self.values[slot, :, position + 1 :] = torch.nan
        self.heads, self.groups, self.width, self.capacity, self.eps, self.scale = heads, groups, width, capacity, 1e-6, width**-0.5

    def arguments(self) -> tuple[Tensor, Tensor | None, Tensor | None, float, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor | None]:
        turn, cache = (self.cos, self.sin), (self.keys, self.values)
        return (self.qkv, self.q_norm, self.k_norm, self.eps, *turn, self.slots, self.positions, *cache, self.scale, self.undivided)

    def exact(self, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [R, H, D], attention [R, H * D], keys and values after the write, in float64 by plain loops."""
        keys, values = self.keys.double(), self.values.double()
        heads, groups, half = self.heads, self.groups, self.width // 2
        qkv = self.qkv.double()
        if self.undivided is not None:
            qkv /= (self.undivided.double().square().mean(1, keepdim=True) + self.eps).sqrt()
        rows = qkv.view(len(self.slots), -1, self.width)
        q = torch.zeros(len(rows), heads, self.width, dtype=torch.float64, device=DEVICE)
        for r, row in enumerate(rows):
            slot, position = int(self.slots[r]), int(self.positions[r])
            at = min(position, len(self.cos) - 1)
            c, s = self.cos[at].double(), self.sin[at].double()
            for head in range(heads + groups):
                x = row[head]
                weight = self.q_norm if head < heads else self.k_norm
                if weight is not None:
                    x = x / (x.square().mean() + self.eps).sqrt() * weight.double()
                x = torch.cat((x[:half] * c - x[half:] * s, x[half:] * c + x[:half] * s))
                if head < heads:
                    q[r, head] = x * self.scale
                else:
                    keys[slot, head - heads, position % self.capacity] = x
            values[slot, :, position % self.capacity] = row[heads + groups :]
        out = torch.zeros_like(q)
        for r in range(len(rows)):
            slot, position = int(self.slots[r]), int(self.positions[r])
            places = [p % self.capacity for p in range(max(0, position - window + 1), position + 1)]
            for head in range(heads):
                k, v = (part[slot, head // (heads // groups)][places] for part in (keys, values))
                out[r, head] = (k @ q[r, head]).softmax(0) @ v
        return q, out.flatten(1), keys, values


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("norm", "inputs"), [(True, 0), (False, 0), (True, 72)])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape: tuple[int, int, int, int], norm: bool, inputs: int, dtype: torch.dtype) -> None:
    capacity = shape[-1]
    for run in (decode_attention, decode_attention_twin):
        case = Case(*shape, dtype, [0, 3, capacity - 1, capacity // 2], [2, 0, 5, 1], norm, inputs)
        _, out, keys, values = case.exact(capacity)
        close(run(*case.arguments()), out)
        close(case.keys, keys)
        close(case.values, values)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("window", "inputs"), [(None, 0), (5, 0), (1, 0), (None, 40)])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_one_slot_see_each_other(shape: tuple[int, int, int, int], window: int | None, inputs: int, dtype: torch.dtype) -> None:
    capacity = shape[-1]
    for write, attend in ((rope_write, attention), (rope_write_twin, attention_twin)):
        case = Case(*shape, dtype, [2, 3, 4, 0, 6], [1, 1, 1, 0, 3], True, inputs)
        exact_q, out, keys, values = case.exact(window or capacity)
        q = write(*case.arguments())
        close(q, exact_q)
        close(case.keys, keys)
        close(case.values, values)
        close(attend(q, case.slots, case.positions, case.keys, case.values, window), out)


def test_a_full_ring_holds_the_last_positions() -> None:
    """Positions beyond the capacity, and beyond the rotary table."""
    for run in (decode_attention, decode_attention_twin):
        case = Case(4, 2, 16, 8, torch.float32, [17, 8, 100], [0, 1, 2], True)
        _, out, _, _ = case.exact(8)
        close(run(*case.arguments()), out)


def test_neighbours_change_nothing() -> None:
    case = Case(4, 2, 32, 40, torch.bfloat16, [9, 30, 2], [0, 1, 2], True)
    first = decode_attention(*case.arguments())
    case.qkv[0], case.qkv[2] = torch.nan, 7.0
    case.positions[2] = 39
    assert torch.equal(decode_attention(*case.arguments())[1], first[1])


def test_padding_rows_may_share_a_slot() -> None:
    case = Case(4, 2, 16, 8, torch.float32, [1, 3, 3, 3], [0, 2, 2, 2], True)
    _, out, _, _ = case.exact(8)
    close(decode_attention(*case.arguments())[:1], out[:1])
