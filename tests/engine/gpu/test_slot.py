"""What a slot begins with is in that slot, and nothing else has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.kernels.gpu import slot as begin
from tests.engine.gpu.device import DEVICE, TYPES, random

SLOTS = 4


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [48, 2048])
@pytest.mark.parametrize("run", [begin.clear_slot, begin.clear_slot_twin])
def test_clear(run: Callable[..., None], width: int, dtype: torch.dtype) -> None:
    text = torch.full((SLOTS, 700), 5, dtype=torch.int32, device=DEVICE)
    seen = torch.ones(SLOTS, 1300, dtype=torch.int8, device=DEVICE)
    frame_sum, start = random(SLOTS, width, dtype=dtype), random(width, dtype=dtype)
    exact = [text.clone(), seen.clone(), frame_sum.clone()]
    for slot in (0, 1, 3):
        exact[0][slot], exact[1][slot], exact[2][slot] = 77, 0, start
        run(slot, text, 77, seen, frame_sum, start)
        for found, wanted in zip((text, seen, frame_sum), exact, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("run", [begin.fill_slot, begin.fill_slot_twin])
def test_fill(run: Callable[..., None], rows: int, dtype: torch.dtype) -> None:
    keys, values = random(3, SLOTS, 2, 64, 128, dtype=dtype), random(3, SLOTS, 2, 64, 128, dtype=dtype)
    own_keys, own_values = random(3, 2, rows, 128, dtype=dtype), random(3, 2, rows, 128, dtype=dtype)
    exact_keys, exact_values = keys.clone(), values.clone()
    for slot in (1, 3):
        exact_keys[:, slot, :, :rows], exact_values[:, slot, :, :rows] = own_keys, own_values
        run(slot, keys, values, own_keys, own_values)
        assert torch.equal(keys, exact_keys)
        assert torch.equal(values, exact_values)
