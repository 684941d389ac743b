"""Launches on a GPU: one captured graph a stage and bucket, whose only input and output are places in pinned memory.

A launch is: its letter written, the graph. The graph's first kernel reads the letter, its last one leaves the results and then the launch's
number (engine/kernels/gpu/post.py). The host watches for that number and never waits."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import DeviceLost
from engine.gpu.state import DeviceSlots
from engine.kernels.gpu.post import BEGAN, ENDED, NUMBER, answer, fill_fresh, mail, offsets, take_letter

# Words and fresh slots in a letter.
MOST_MAIL, MOST_FRESH = 1024, 16
# Launches whose places may be in use at once: those in flight, and those whose results are being read.
RING = 4
# Nobody tells a host that watches memory that its device has failed: it asks after a launch that takes so long, and again after as long.
ASK_S = 0.1
# A launch takes milliseconds; one that takes so long will never end.
LOST_S = 20.0

Work = Callable[[Tensor], tuple[Tensor, ...]]
"""(slots [R] int32) -> results, each [R, ...] contiguous, of whole 4-byte words. Runs on the device alone: no waiting, no shapes that depend on
values."""
Arrays = tuple[NDArray[np.generic], ...]


@dataclass
class Results:
    """What a launch returns, once it is done: arrays of its live rows in pinned memory, valid until `RING` launches later, and its duration."""

    arrays: Arrays
    seconds: float


@contextmanager
def failing() -> Iterator[None]:
    """What PyTorch says inside about a device that has failed is raised as DeviceLost."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost(str(error)) from error


class InFlight:
    """A launch on its way: launch `number`, whose answer's line is `answered` (NUMBER, BEGAN, ENDED)."""

    def __init__(self, number: int, answered: memoryview, arrays: Arrays) -> None:
        self._number, self._answered, self._arrays = number, answered, arrays
        self._made_s = time.monotonic()
        self._ask_s = self._made_s + ASK_S

    def done(self) -> bool:
        """Raises DeviceLost."""
        if self._answered[NUMBER] == self._number:
            return True
        if time.monotonic() > self._ask_s:
            self._ask()
        return False

    def _ask(self) -> None:
        now_s = time.monotonic()
        self._ask_s = now_s + ASK_S
        with failing():
            over = torch.cuda.current_stream().query()
        if over and self._answered[NUMBER] != self._number:
            raise DeviceLost(f"the device has nothing left to do and launch {self._number} has not answered")
        if now_s - self._made_s > LOST_S:
            raise DeviceLost(f"launch {self._number} has not ended within {LOST_S:g} s")

    def results(self) -> Results:
        """Only once done."""
        return Results(self._arrays, (self._answered[ENDED] - self._answered[BEGAN]) * 1e-9)


class Post:
    """The rings in memory that both sides see, and each side's count of the launches."""

    def __init__(self, device: torch.device, most_rows: int, result_bytes: int, resting: list[int]) -> None:
        """`resting`: words that every launch sets to zero."""
        pinned = device.type == "cuda"
        self.letters = torch.full((RING, most_rows + 3 * MOST_FRESH + 2 * MOST_MAIL), -1, dtype=torch.int32, pin_memory=pinned)
        self.answers = torch.zeros(RING, -(-result_bytes // 16) * 4, dtype=torch.int32, pin_memory=pinned)
        self.answered = torch.zeros(RING, 3, dtype=torch.int64, pin_memory=pinned)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.began = torch.zeros(1, dtype=torch.int64, device=device)
        self.fresh = torch.full((3, MOST_FRESH), -1, dtype=torch.int32, device=device)
        self.lines = [memoryview(line) for line in self.answered.numpy()]
        self.room = MOST_MAIL - len(resting)
        """Words that a letter can take."""
        self._letters = [memoryview(letter) for letter in self.letters.numpy()]
        self._fresh = most_rows
        self._words = most_rows + 3 * MOST_FRESH + len(resting)
        self.letters[:, self._words - len(resting) : self._words] = torch.tensor(resting, dtype=torch.int32)
        self.letters[:, -MOST_MAIL:] = 0
        self._posted = [0] * RING
        self._freshened = [0] * RING
        self._number = 0

    def write(self, rows: list[int], fresh: list[tuple[int, int, int]], words: list[int], values: list[int]) -> int:
        """The next launch's letter: at most `most_rows` rows, MOST_FRESH fresh slots, and `room` words. Returns its number. Raises DeviceLost."""
        self._number += 1
        at = self._number % RING
        if self._number > RING and self.lines[at][NUMBER] != self._number - RING:
            # Never in the loop, which has two under way at most; who computes a long prompt at once may be ahead of the device.
            before = InFlight(self._number - RING, self.lines[at], ())
            while not before.done():
                pass
        letter = self._letters[at]
        letter[: len(rows)] = array("i", rows)
        if fresh or self._freshened[at]:
            for line, part in enumerate(zip(*fresh, strict=True) if fresh else ()):
                first = self._fresh + line * MOST_FRESH
                letter[first : first + len(part)] = array("i", part)
            stale = self._freshened[at] - len(fresh)
            if stale > 0:
                letter[self._fresh + len(fresh) : self._fresh + len(fresh) + stale] = array("i", [-1]) * stale
            self._freshened[at] = len(fresh)
        first, count = self._words, len(words)
        if count:
            letter[first : first + count] = array("i", words)
            letter[first + MOST_MAIL : first + MOST_MAIL + count] = array("i", values)
        stale = self._posted[at] - count
        if stale > 0:
            letter[first + count : first + count + stale] = array("i", [-1]) * stale
        self._posted[at] = count
        return self._number

    def arrays(self, results: tuple[Tensor, ...]) -> list[Arrays]:
        """Such results as they will lie in each place of the ring."""
        return [
            tuple(
                answers[place : place + result.numel() * result.element_size() // 4].view(result.dtype).view(result.shape).numpy()
                for result, place in zip(results, offsets(results), strict=True)
            )
            for answers in self.answers
        ]


class Launcher:
    """Runs works for slots in launch order, on the current stream. `add` a work for each bucket before it is launched; without a GPU a
    work runs as it is."""

    def __init__(self, slots: DeviceSlots, most_rows: int, result_bytes: int) -> None:
        self._slots = slots
        self._graphs = slots.device.type == "cuda"
        self._post = Post(slots.device, most_rows, result_bytes, slots.resting)
        self._rows = torch.full((most_rows,), slots.idle, dtype=torch.int32, device=slots.device)
        self._captured: dict[tuple[object, int], tuple[torch.cuda.CUDAGraph, list[Arrays]]] = {}
        self._works: dict[object, Work] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None

    def add(self, name: object, work: Work, bucket: int) -> None:
        """Make a work launchable with this many rows. Add the largest bucket first: the smaller ones use its memory."""
        self._works[name] = work
        if self._graphs:
            self._capture(name, work, bucket)

    def _capture(self, name: object, work: Work, bucket: int) -> None:
        # Once for real: compiles kernels and lets libraries set themselves up, which a capture may not.
        self._post.write([self._slots.idle] * bucket, [], [], [])
        self._on_device(work, bucket)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            results = self._on_device(work, bucket)
        self._captured[name, bucket] = graph, self._post.arrays(results)

    @torch.inference_mode()
    def _on_device(self, work: Work, bucket: int) -> tuple[Tensor, ...]:
        post, s = self._post, self._slots
        take_letter(
            post.letters, post.number, post.began, self._rows, post.fresh, s.control, s.text, s.pad, s.seen, s.frame_sum, s.start
        )  # fmt: skip
        fill_fresh(post.fresh, s.prefix_keys, s.prefix_values, s.keys, s.values)
        results = work(self._rows[:bucket])
        answer(results, post.number, post.began, post.answers, post.answered)
        return results

    def launch(self, name: object, rows: list[int], bucket: int) -> InFlight:
        """Run a work for `rows`, padded to `bucket` with the idle slot, after telling the device all that is posted. Raises DeviceLost."""
        with failing():
            return self._launch(name, rows, bucket)

    def _launch(self, name: object, rows: list[int], bucket: int) -> InFlight:
        *more, letter = self._slots.mail(self._post.room)
        # What is told before the letter must not be cleared by it.
        fresh = self._slots.fresh(0 if more else MOST_FRESH)
        for words, values in more:
            # A long text at once: rare, so it may wait for the copy.
            both = torch.tensor((words, values), dtype=torch.int32).to(self._rows.device)
            mail(self._slots.control, both[0], both[1])
        number = self._post.write(rows + [self._slots.idle] * (bucket - len(rows)), fresh, *letter)
        if (name, bucket) in self._captured:
            graph, arrays = self._captured[name, bucket]
            graph.replay()
        else:
            arrays = self._post.arrays(self._on_device(self._works[name], bucket))
        at = number % RING
        return InFlight(number, self._post.lines[at], tuple(array[: len(rows)] for array in arrays[at]))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, Python collects no garbage: graphs of an engine that is gone may be among it, and to destroy one breaks a capture off."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
