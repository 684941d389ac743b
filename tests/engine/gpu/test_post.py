"""What a launch is told arrives, what it answers is there before its number is, and a device that has failed is found out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import DeviceLost
from engine.gpu import graphs
from engine.gpu.graphs import RING, InFlight, Post
from engine.kernels.gpu import post
from tests.engine.gpu.device import DEVICE, random

MOST_ROWS = 24
SLOTS = 5
RESTING = [4100, 4200]
WAYS = [(post.take_letter, post.fill_fresh, post.answer), (post.take_letter_twin, post.fill_fresh_twin, post.answer_twin)]


@pytest.mark.parametrize("run", [post.mail, post.mail_twin])
def test_mail(run: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    control = torch.zeros(900, dtype=torch.int32, device=DEVICE)
    index = torch.full((300,), -1, dtype=torch.int32, device=DEVICE)
    index[:280] = torch.randperm(900)[:280].to(torch.int32)
    value = torch.randint(-(2**31), 2**31, (300,)).to(torch.int32).to(DEVICE)
    run(control, index, value)
    exact = torch.zeros_like(control)
    exact[index[:280].long()] = value[:280]
    assert torch.equal(control, exact)


@pytest.mark.parametrize(("take_letter", "fill", "answer"), WAYS)
def test_letters_and_answers_come_to_their_places(take_letter: Any, fill: Any, answer: Any) -> None:
    """More launches than the ring is long, each with other rows, fresh slots, words and results."""
    pcm_bytes = 3 * 6000 * 2
    there = Post(DEVICE, MOST_ROWS, pcm_bytes + 64, RESTING)
    control = torch.full((5000,), 7, dtype=torch.int32, device=DEVICE)
    text = control[1000:4000].view(SLOTS, 600)
    seen = torch.ones(SLOTS, 1300, dtype=torch.int8, device=DEVICE)
    frame_sum, start = random(SLOTS, 1100), random(1100)
    keys, values = random(3, SLOTS, 2, 48, 64), random(3, SLOTS, 2, 48, 64)
    prefix_keys, prefix_values = random(7, 3, 2, 16, 64), random(7, 3, 2, 16, 64)
    exact_seen, exact_sum, exact_keys, exact_values = seen.clone(), frame_sum.clone(), keys.clone(), values.clone()
    rows = torch.zeros(MOST_ROWS, dtype=torch.int32, device=DEVICE)
    exact = control.clone()
    for number in range(1, 2 * RING + 2):
        mine = list(range(number, number + number % 5))
        words = [1000 + 7 * number + place for place in range(3 * (number % 4))]
        told = [1000 * number - place for place in words]
        fresh = [(slot, (number + slot) % 7, 5 * (slot % 4)) for slot in range(number % 3, SLOTS, 2)][: number % 4]
        assert there.write(mine, fresh, words, told) == number
        control[RESTING], exact[RESTING] = 99, 0
        take_letter(there.letters, there.number, there.began, rows, there.fresh, control, text, -3, seen, frame_sum, start)
        fill(there.fresh, prefix_keys, prefix_values, keys, values)
        for slot, place, count in fresh:
            exact[1000:4000].view(SLOTS, 600)[slot] = -3
            exact_seen[slot], exact_sum[slot] = 0, start
            exact_keys[:, slot, :, :count], exact_values[:, slot, :, :count] = prefix_keys[place, :, :, :count], prefix_values[place, :, :, :count]
        exact[torch.tensor(words, dtype=torch.int64)] = torch.tensor(told, dtype=torch.int32, device=DEVICE)
        assert rows[: len(mine)].tolist() == mine
        pairs = [(control, exact), (seen, exact_seen), (frame_sum, exact_sum), (keys, exact_keys), (values, exact_values)]
        assert all(torch.equal(found, wanted) for found, wanted in pairs)
        seen += 1
        exact_seen += 1
        pcm = torch.randint(-(2**15), 2**15, (3, 6000)).to(torch.int16).to(DEVICE)
        broken = torch.tensor([0, number, 0], dtype=torch.int32, device=DEVICE)
        results = [(), (broken,), (pcm, broken)][number % 3]
        arrays = there.arrays(results)[number % RING]
        flight = InFlight(number, there.lines[number % RING], arrays)
        assert not flight.done()
        answer(results, there.number, there.began, there.answers, there.answered)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert flight.done()
        assert flight.results().seconds >= 0.0
        for result, array in zip(results, flight.results().arrays, strict=True):
            assert torch.equal(torch.from_numpy(array), result.cpu())


def test_a_letter_is_not_written_before_the_launch_that_had_its_place_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Post(torch.device("cpu"), MOST_ROWS, 64, [])
    monkeypatch.setattr(graphs, "time", SimpleNamespace(monotonic=itertools.count(step=graphs.ASK_S / 3).__next__))
    asked = []

    def query() -> bool:
        asked.append(there.letters[1 % RING, 0].item())
        if len(asked) == 3:
            there.answered[1 % RING, post.NUMBER] = 1
        return False

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))
    for number in range(1, RING + 1):
        there.write([number + 10], [], [], [])
    assert not asked
    there.write([77], [], [], [])
    assert asked == [11, 11, 11]
    assert there.letters[1 % RING, 0] == 77


@pytest.mark.parametrize("how", ["fails", "forgets", "hangs"])
def test_a_device_that_never_answers_is_lost(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Whether it says why, has only nothing left to do, or never ends; as long as it may be at work it is waited for."""
    there = Post(torch.device("cpu"), MOST_ROWS, 64, [])
    now_s = 0.0
    works = True

    def query() -> bool:
        if how == "fails" and not works:
            raise torch.AcceleratorError("an illegal memory access was encountered")
        return how == "forgets" and not works

    monkeypatch.setattr(graphs, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))
    flight = InFlight(1, there.lines[1], ())
    for _ in range(10):
        now_s += graphs.ASK_S / 2
        assert not flight.done()
    works = False
    why = {"fails": "illegal memory", "forgets": "has not answered", "hangs": "has not ended within 20 s"}
    with pytest.raises(DeviceLost, match=why[how]):
        for _ in range(3):
            now_s += graphs.LOST_S / 2 if how == "hangs" else graphs.ASK_S / 2
            flight.done()
