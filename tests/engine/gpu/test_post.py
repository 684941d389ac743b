"""What a launch is told arrives, what it answers is there before its number is, and a device that has failed is found out."""

from __future__ import annotations

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
from tests.engine.gpu.device import DEVICE

MOST_ROWS = 24
WAYS = [(post.take_letter, post.answer), (post.take_letter_twin, post.answer_twin)]


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


@pytest.mark.parametrize(("take_letter", "answer"), WAYS)
def test_letters_and_answers_come_to_their_places(take_letter: Any, answer: Any) -> None:
    """More launches than the ring is long, each with other rows, words and results."""
    pcm_bytes = 3 * 6000 * 2
    there = Post(DEVICE, MOST_ROWS, pcm_bytes + 64)
    control = torch.zeros(5000, dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(MOST_ROWS, dtype=torch.int32, device=DEVICE)
    exact = control.clone()
    for number in range(1, 2 * RING + 2):
        mine = list(range(number, number + number % 5))
        words = [7 * number + place for place in range(3 * (number % 4))]
        values = [1000 * number - place for place in words]
        assert there.write(mine, 99, 8, words, values) == number
        take_letter(there.letters, there.number, there.began, rows, control)
        exact[torch.tensor(words, dtype=torch.int64)] = torch.tensor(values, dtype=torch.int32, device=DEVICE)
        assert rows[:8].tolist() == (mine + 8 * [99])[:8]
        assert torch.equal(control, exact)
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
        assert 0.0 <= flight.results().seconds < 60.0
        for result, array in zip(results, flight.results().arrays, strict=True):
            assert torch.equal(torch.from_numpy(array), result.cpu())


@pytest.mark.parametrize("fails", [True, False])
def test_a_device_that_never_answers_is_lost(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Whether it says why or has only nothing left to do; as long as it works it is waited for."""
    there = Post(torch.device("cpu"), MOST_ROWS, 64)
    now_s = 0.0
    works = True

    def query() -> bool:
        if fails and not works:
            raise torch.AcceleratorError("an illegal memory access was encountered")
        return not works

    monkeypatch.setattr(graphs.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))
    flight = InFlight(1, there.lines[1], ())
    for _ in range(10):
        now_s += graphs.ASK_S / 2
        assert not flight.done()
    works = False
    with pytest.raises(DeviceLost, match="illegal memory" if fails else "has not answered"):
        for _ in range(3):
            now_s += graphs.ASK_S / 2
            flight.done()
