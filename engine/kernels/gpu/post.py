# mypy: disable-error-code="no-untyped-def"
"""The post between host and device: what a launch is told, and what it answers, through pinned memory that both see.

A launch is a number, counted up on both sides; its place in each ring is that number modulo the ring's length. So a captured graph finds its
letter and leaves its answer without an argument, and no copy, no event and no call stands beside the graph's own."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from engine.kernels.gpu import INTERPRETED, by_kernel, jit, jit_once, power_of_two, tl
from engine.kernels.gpu.slot import clear_slot_twin, fill_slot_twin

NUMBER, BEGAN, ENDED = range(3)
"""Columns of `answered` [ring, 3] int64: the launch that has answered there, and when it began and ended, nanoseconds of the device."""
_BLOCK = 4096


def mail(control: Tensor, index: Tensor, value: Tensor) -> None:
    """control[index[i]] = value[i] where index[i] >= 0; all int32, control [W], index and value [M]. No index may come twice in a call:
    words are written in no order."""
    if not by_kernel(control):
        mail_twin(control, index, value)
        return
    mail_kernel[(-(-len(index) // 256),)](control, index, value, len(index), BLOCK=256)


def mail_twin(control: Tensor, index: Tensor, value: Tensor) -> None:
    kept = index >= 0
    control[index[kept].long()] = value[kept]


def take_letter(
    letters: Tensor, number: Tensor, began: Tensor, rows: Tensor, fresh: Tensor, control: Tensor,
    text: Tensor, pad: int, seen: Tensor, frame_sum: Tensor, start: Tensor,
) -> None:  # fmt: skip
    """The next launch begins: `number` [1] int64 counts it, `began` [1] int64 is now, and its letter of letters [ring, R + 3 F + 2 M] int32 is
    read: `rows` [R] int32, `fresh` [3, F] int32, then M words of `control` and their values as `mail` takes them. Before these the slots that
    fresh[0] names, up to the first below 0, are cleared as by `clear_slot`."""
    if not by_kernel(control):
        take_letter_twin(letters, number, began, rows, fresh, control, text, pad, seen, frame_sum, start)
        return
    ring, width = letters.shape
    count = (width - len(rows) - fresh.numel()) // 2
    assert text.is_contiguous() and seen.is_contiguous() and frame_sum.is_contiguous() and start.is_contiguous() and fresh.is_contiguous()
    take_letter_kernel[(1,)](
        letters, number, began, rows, fresh, control, text, pad, seen, frame_sum, start, ring, width, len(rows), count, text.shape[1],
        seen.shape[1], len(start), FRESH=fresh.shape[1], BLOCK=power_of_two(max(len(rows), count, fresh.numel())), CLOCK=not INTERPRETED, num_warps=8,
    )  # fmt: skip


def take_letter_twin(
    letters: Tensor, number: Tensor, began: Tensor, rows: Tensor, fresh: Tensor, control: Tensor,
    text: Tensor, pad: int, seen: Tensor, frame_sum: Tensor, start: Tensor,
) -> None:  # fmt: skip
    number += 1
    began.fill_(time.monotonic_ns())
    letter = letters[int(number) % len(letters)].to(control.device)
    count = (len(letter) - len(rows) - fresh.numel()) // 2
    own_rows, own_fresh, words, values = torch.split(letter, [len(rows), fresh.numel(), count, count])
    rows.copy_(own_rows)
    fresh.copy_(own_fresh.view_as(fresh))
    for slot in fresh[0].tolist():
        if slot < 0:
            break
        clear_slot_twin(slot, text, pad, seen, frame_sum, start)
    mail_twin(control, words, values)


def fill_fresh(fresh: Tensor, prefix_keys: Tensor, prefix_values: Tensor, keys: Tensor, values: Tensor) -> None:
    """The slots that fresh[0] names get the first fresh[2] positions of place fresh[1]: prefix_keys and prefix_values [places, layers, G, most,
    D], keys and values [layers, S, G, P, D]."""
    if not by_kernel(keys):
        fill_fresh_twin(fresh, prefix_keys, prefix_values, keys, values)
        return
    layers, slots, groups, positions, width = keys.shape
    line = prefix_keys.shape[3] * width
    assert keys.is_contiguous() and values.is_contiguous() and prefix_keys.is_contiguous() and prefix_values.is_contiguous()
    fill_fresh_kernel[(layers * groups,)](
        fresh, prefix_keys, prefix_values, keys, values, slots, groups, positions * width, line, width,
        FRESH=fresh.shape[1], LINE=power_of_two(line),
    )  # fmt: skip


def fill_fresh_twin(fresh: Tensor, prefix_keys: Tensor, prefix_values: Tensor, keys: Tensor, values: Tensor) -> None:
    for slot, place, rows in fresh.t().tolist():
        if slot < 0:
            break
        fill_slot_twin(slot, keys, values, prefix_keys[place, :, :, :rows], prefix_values[place, :, :, :rows])


def answer(results: tuple[Tensor, ...], number: Tensor, began: Tensor, answers: Tensor, answered: Tensor) -> None:
    """The launch ends: its results, each contiguous and of whole 4-byte words, into its place of answers [ring, W] int32, one after the other on
    16 bytes; then `answered` says so."""
    if not by_kernel(number):
        answer_twin(results, number, began, answers, answered)
        return
    words = [result.flatten().view(torch.int32) for result in results]
    places = offsets(results)
    for part, place in zip(words[:-1], places[:-1], strict=True):
        grid = (-(-len(part) // _BLOCK),)
        send_kernel[grid](part, number, answers, len(answers), answers.shape[1], place, len(part), BLOCK=_BLOCK, num_warps=8)
    last, place, count = (words[-1], places[-1], len(words[-1])) if words else (answered, 0, 0)
    ring, width = answers.shape
    block = power_of_two(max(count, 1))
    answer_kernel[(1,)](last, number, began, answers, answered, ring, width, place, count, BLOCK=block, CLOCK=not INTERPRETED, num_warps=1)


def answer_twin(results: tuple[Tensor, ...], number: Tensor, began: Tensor, answers: Tensor, answered: Tensor) -> None:
    at = int(number) % len(answers)
    for result, place in zip(results, offsets(results), strict=True):
        part = result.flatten().view(torch.int32)
        answers[at, place : place + len(part)] = part
    answered[at, BEGAN], answered[at, ENDED], answered[at, NUMBER] = began[0], time.monotonic_ns(), number[0]


def offsets(results: tuple[Tensor, ...]) -> list[int]:
    """Where each of them lies in an answer, in words of 4 bytes."""
    places, end = [], 0
    for result in results:
        places.append(end)
        end += -(-result.numel() * result.element_size() // 16) * 4
    return places


@jit
def mail_kernel(control, index, value, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index + i, mask=i < count, other=-1)
    tl.store(control + place, tl.load(value + i, mask=i < count, other=0), mask=place >= 0)


@jit
def now_ns(CLOCK: tl.constexpr):
    """The device's clock; the interpreter has none."""
    if CLOCK:
        return tl.extra.cuda.globaltimer().to(tl.int64)
    else:
        return tl.full([], 0, tl.int64)


@jit_once("pad")
def take_letter_kernel(
    letters, number, began, rows, fresh, control, text, pad, seen, frame_sum, start, ring, width, many, count, positions, codebook, hidden,
    FRESH: tl.constexpr, BLOCK: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """One program, so that all is asked of the host's memory at once, and nobody sees the number change."""
    mine = tl.load(number) + 1
    letter = letters + (mine % ring) * width
    mail = letter + many + 3 * FRESH
    i = tl.arange(0, BLOCK)
    row = tl.load(letter + i, mask=i < many, other=0, cache_modifier=".cv")
    new = tl.load(letter + many + i, mask=i < 3 * FRESH, other=-1, cache_modifier=".cv")
    place = tl.load(mail + i, mask=i < count, other=-1, cache_modifier=".cv")
    value = tl.load(mail + count + i, mask=i < count, other=0, cache_modifier=".cv")
    tl.debug_barrier()
    tl.store(number, mine)
    tl.store(began, now_ns(CLOCK))
    tl.store(rows + i, row, mask=i < many)
    tl.store(fresh + i, new, mask=i < 3 * FRESH)
    some = tl.sum(tl.where((i < FRESH) & (new >= 0), 1, 0))
    for f in range(some):
        slot = tl.sum(tl.where(i == f, new, 0)).to(tl.int64)
        for at in range(0, positions, BLOCK):
            tl.store(text + slot * positions + at + i, tl.zeros([BLOCK], tl.int32) + pad, mask=at + i < positions)
        for at in range(0, codebook, BLOCK):
            tl.store(seen + slot * codebook + at + i, tl.zeros([BLOCK], tl.int8), mask=at + i < codebook)
        for at in range(0, hidden, BLOCK):
            tl.store(frame_sum + slot * hidden + at + i, tl.load(start + at + i, mask=at + i < hidden), mask=at + i < hidden)
    tl.debug_barrier()
    tl.store(control + place, value, mask=place >= 0)


@jit
def fill_fresh_kernel(
    fresh, prefix_keys, prefix_values, keys, values, slots, groups, room, line, width, FRESH: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """One layer's kv head a program."""
    new = tl.load(fresh + tl.arange(0, FRESH))
    some = tl.sum(tl.where(new >= 0, 1, 0))
    layer = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    i = tl.arange(0, LINE)
    for f in range(some):
        slot = tl.load(fresh + f)
        place = tl.load(fresh + FRESH + f).to(tl.int64)
        inside = i < tl.load(fresh + 2 * FRESH + f) * width
        home = ((layer.to(tl.int64) * slots + slot) * groups + group) * room + i
        own = (place * tl.num_programs(0) + tl.program_id(0)) * line + i
        tl.store(keys + home, tl.load(prefix_keys + own, mask=inside), mask=inside)
        tl.store(values + home, tl.load(prefix_values + own, mask=inside), mask=inside)


@jit_once("count", "place")
def send_kernel(part, number, answers, ring, width, place, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    home = answers + (tl.load(number) % ring) * width + place
    tl.store(home + i, tl.load(part + i, mask=i < count), mask=i < count)


@jit_once("count", "place")
def answer_kernel(part, number, began, answers, answered, ring, width, place, count, BLOCK: tl.constexpr, CLOCK: tl.constexpr):
    """The last part of the results, then the number, which the host watches: it must not be seen before them."""
    mine = tl.load(number)
    at = mine % ring
    i = tl.arange(0, BLOCK)
    tl.store(answers + at * width + place + i, tl.load(part + i, mask=i < count), mask=i < count)
    line = answered + at * 3
    tl.store(line + 1, tl.load(began))
    tl.store(line + 2, now_ns(CLOCK))
    tl.debug_barrier()
    if CLOCK:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;", "=r,l,l", [line, mine], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(line, mine)
