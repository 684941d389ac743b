# mypy: disable-error-code="no-untyped-def"
"""What a slot begins with, in one kernel each: for what no launch brings along (post.py), such as a long prefix.

text [S, P] int32, seen [S, codebook] int8, frame_sum [S, E]; keys and values [layers, S, G, P, D]."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.gpu import by_kernel, jit_once, power_of_two, tl

_WIDTH, _LINE = 1024, 4096


def clear_slot(slot: int, text: Tensor, pad: int, seen: Tensor, frame_sum: Tensor, start: Tensor) -> None:
    """A slot's text becomes padding, nothing counts as seen, and frame_sum is start [E]."""
    if not by_kernel(text):
        clear_slot_twin(slot, text, pad, seen, frame_sum, start)
        return
    assert text.is_contiguous() and seen.is_contiguous() and frame_sum.is_contiguous() and start.is_contiguous()
    longest = max(text.shape[1], seen.shape[1], len(start))
    clear_slot_kernel[(-(-longest // _WIDTH),)](
        slot, text, pad, seen, frame_sum, start, text.shape[1], seen.shape[1], len(start), WIDTH=_WIDTH
    )  # fmt: skip


def clear_slot_twin(slot: int, text: Tensor, pad: int, seen: Tensor, frame_sum: Tensor, start: Tensor) -> None:
    text[slot].fill_(pad)
    seen[slot].zero_()
    frame_sum[slot].copy_(start)


def fill_slot(slot: int, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> None:
    """The first n positions of a slot become own_keys and own_values [layers, G, n, D]."""
    if not by_kernel(keys):
        fill_slot_twin(slot, keys, values, own_keys, own_values)
        return
    layers, slots, groups, positions, width = keys.shape
    assert keys.is_contiguous() and values.is_contiguous() and own_keys.is_contiguous() and own_values.is_contiguous()
    line = own_keys.shape[2] * width
    fill_slot_kernel[(layers * groups, -(-line // _LINE))](
        slot, keys, values, own_keys, own_values, slots, groups, positions * width, line, LINE=min(_LINE, power_of_two(line))
    )  # fmt: skip


def fill_slot_twin(slot: int, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> None:
    rows = own_keys.shape[2]
    keys[:, slot, :, :rows] = own_keys
    values[:, slot, :, :rows] = own_values


@jit_once("slot", "pad")
def clear_slot_kernel(slot, text, pad, seen, frame_sum, start, positions, codebook, width, WIDTH: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    slot = slot.to(tl.int64)
    tl.store(text + slot * positions + i, tl.zeros([WIDTH], tl.int32) + pad, mask=i < positions)
    tl.store(seen + slot * codebook + i, tl.zeros([WIDTH], tl.int8), mask=i < codebook)
    tl.store(frame_sum + slot * width + i, tl.load(start + i, mask=i < width), mask=i < width)


@jit_once("slot", "line")
def fill_slot_kernel(slot, keys, values, own_keys, own_values, slots, groups, room, line, LINE: tl.constexpr):
    """A part of one layer's kv head a program: its first positions lie side by side in both."""
    layer = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    i = tl.program_id(1) * LINE + tl.arange(0, LINE)
    home = ((layer.to(tl.int64) * slots + slot) * groups + group) * room + i
    own = tl.program_id(0).to(tl.int64) * line + i
    tl.store(keys + home, tl.load(own_keys + own, mask=i < line), mask=i < line)
    tl.store(values + home, tl.load(own_values + own, mask=i < line), mask=i < line)
