"""Launches on a GPU: one captured graph a stage and bucket, whose only input is a small vector from the host.

A launch is: the vector to the device, the graph, its results to pinned memory, an event. The host asks the event and never waits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import DeviceLost
from engine.gpu.state import DeviceSlots
from engine.kernels.gpu.sample import mail

MOST_MAIL = 1024
# Launches whose buffers may be in use at once: those in flight, and those whose results are being read.
RING = 4

Work = Callable[[Tensor], tuple[Tensor, ...]]
"""(slots [R] int32) -> results, each [R, ...]. Runs on the device alone: no waiting, no shapes that depend on values."""


@dataclass
class Results:
    """What a launch returns, once it is done: arrays of its live rows in pinned memory, valid until `RING` launches later, and its duration."""

    arrays: tuple[NDArray[np.generic], ...]
    seconds: float


class InFlight:
    """A launch on its way. On a CPU it is over at once."""

    def __init__(self, arrays: tuple[NDArray[np.generic], ...], begin: torch.cuda.Event | None, end: torch.cuda.Event | None) -> None:
        self._arrays, self._begin, self._end = arrays, begin, end

    def done(self) -> bool:
        """Raises DeviceLost."""
        try:
            return self._end is None or bool(self._end.query())  # type: ignore[no-untyped-call]
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error)) from error

    def results(self) -> Results:
        """Only once done."""
        seconds = self._begin.elapsed_time(self._end) / 1000.0 if self._begin is not None and self._end is not None else 0.0
        return Results(self._arrays, seconds)


class Buffers:
    """What goes down and comes up, in pinned memory where there is a GPU."""

    def __init__(self, device: torch.device, most_rows: int, result_bytes: int) -> None:
        pinned = device.type == "cuda"
        self.inbox = [torch.full((most_rows + 2 * MOST_MAIL,), -1, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self.inbox_array = [buffer.numpy() for buffer in self.inbox]
        self.outbox = [torch.zeros(result_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(RING)]
        self.events = [(_event(), _event()) for _ in range(RING)] if pinned else []
        self.posted = [0] * RING


class Launcher:
    """Runs works for slots in launch order, on the current stream. `add` a work for each bucket before it is launched; without a GPU a
    work runs as it is."""

    def __init__(self, slots: DeviceSlots, most_rows: int, result_bytes: int) -> None:
        self._slots = slots
        self._rows = most_rows
        self._graphs = slots.device.type == "cuda"
        self._buffers = Buffers(slots.device, most_rows, result_bytes)
        self._inbox = torch.full((most_rows + 2 * MOST_MAIL,), -1, dtype=torch.int32, device=slots.device)
        self._inbox[:most_rows] = slots.idle
        self._captured: dict[tuple[object, int], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._works: dict[object, Work] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        self._turn = 0

    def add(self, name: object, work: Work, bucket: int) -> None:
        """Make a work launchable with this many rows. Add the largest bucket first: the smaller ones use its memory."""
        self._works[name] = work
        if self._graphs:
            self._capture(name, work, bucket)

    def _capture(self, name: object, work: Work, bucket: int) -> None:
        # Once for real: compiles kernels and lets libraries set themselves up, which a capture may not.
        self._on_device(work, bucket)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            results = self._on_device(work, bucket)
        self._captured[name, bucket] = graph, results

    def _on_device(self, work: Work, bucket: int) -> tuple[Tensor, ...]:
        self._deliver()
        return work(self._inbox[:bucket])

    def _deliver(self) -> None:
        mail(self._slots.control, self._inbox[self._rows : self._rows + MOST_MAIL], self._inbox[self._rows + MOST_MAIL :])

    def launch(self, name: object, rows: list[int], bucket: int) -> InFlight:
        """Run a work for `rows`, padded to `bucket` with the idle slot, after telling the device all that is posted. Raises DeviceLost."""
        try:
            return self._launch(name, rows, bucket)
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error)) from error

    def _launch(self, name: object, rows: list[int], bucket: int) -> InFlight:
        self._slots.rest()
        *more, letter = self._slots.mail(MOST_MAIL)
        for words, values in more:
            # A long text at once: rare, so it may wait for the copy.
            both = torch.tensor((words, values), dtype=torch.int32).to(self._inbox.device)
            mail(self._slots.control, both[0], both[1])
        at = self._send(rows, *letter)
        buffers = self._buffers
        begin, end = buffers.events[at] if buffers.events else (None, None)
        if begin is not None:
            begin.record()
        if (name, bucket) in self._captured:
            graph, results = self._captured[name, bucket]
            graph.replay()
        else:
            results = self._on_device(self._works[name], bucket)
        arrays = self._fetch(at, results, len(rows))
        if end is not None:
            end.record()
        return InFlight(arrays, begin, end)

    def _send(self, rows: list[int], words: list[int], values: list[int]) -> int:
        at = self._turn = (self._turn + 1) % RING
        buffers = self._buffers
        array, first = buffers.inbox_array[at], self._rows
        array[: len(rows)] = rows
        array[len(rows) : first] = self._slots.idle
        array[first : first + len(words)] = words
        array[first + len(words) : first + max(len(words), buffers.posted[at])] = -1
        array[first + MOST_MAIL : first + MOST_MAIL + len(values)] = values
        buffers.posted[at] = len(words)
        self._inbox.copy_(buffers.inbox[at], non_blocking=True)
        return at

    def _fetch(self, at: int, results: tuple[Tensor, ...], rows: int) -> tuple[NDArray[np.generic], ...]:
        arrays, offset = [], 0
        for result in results:
            part = result[:rows]
            size = part.numel() * part.element_size()
            home = self._buffers.outbox[at][offset : offset + size].view(part.dtype).view(part.shape)
            home.copy_(part, non_blocking=True)
            arrays.append(home.numpy())
            offset += -(-size // 16) * 16
        return tuple(arrays)


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


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
