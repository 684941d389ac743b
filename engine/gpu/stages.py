"""GpuStages: the stages as captured graphs on a GPU. Nothing here waits for the device; at most two launches are under way.

Without a GPU the same code runs eagerly, with the twins of the kernels: that is how it is tested where there is none."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.gpu.codec import GpuCodec
from engine.gpu.graphs import InFlight, Launcher, failing
from engine.gpu.predictor import GpuPredictor
from engine.gpu.prefixes import DevicePrefixes
from engine.gpu.stack import Stack
from engine.gpu.state import DeviceSlots
from engine.gpu.talker import GpuTalker
from engine.kernels.gpu import dependent
from engine.kernels.gpu.linear import streamed
from engine.model.prompt import Prefix, Reference, embed, embed_frames
from engine.scheduler import Stage
from engine.stages.base import BaseStages, Launched
from engine.stages.pending import Finished

T = TypeVar("T")
# Launches of each graph that are timed at start, after one that is not.
TIMED = 3
# Clips whose codec states are kept, least recently used first to go: some 3 MB each.
MOST_PRIMED = 64


@dataclass
class OnItsWay(Generic[T]):
    """A launch, and how its results are read once they are there."""

    flight: InFlight
    read: Callable[[tuple[NDArray[np.generic], ...]], T]
    seconds: float | None = None

    def done(self) -> bool:
        return self.flight.done()

    def result(self) -> T:
        results = self.flight.results()
        self.seconds = results.seconds
        return self.read(results.arrays)


class GpuStages(BaseStages):
    slots: DeviceSlots
    depth = 2

    def _build(self) -> None:
        checkpoint, config = self.checkpoint, self.config
        self.slots = DeviceSlots(checkpoint, config.slots, config.positions, config.prefill_rows)
        self.prefixes = DevicePrefixes(self.slots)
        self.gpu_talker = GpuTalker(checkpoint, self.slots)
        self.gpu_predictor = GpuPredictor(checkpoint, self.slots, config.buckets[-1])
        self.frame_sizes = sorted({*config.chunk_frames, config.first_frames, *range(1, config.chunk_frames[0])})
        dtype = self.slots.hidden.dtype
        self.gpu_codec = GpuCodec(
            checkpoint.codec,
            config.slots + 1,
            self.frame_sizes[-1],
            decoded=self.slots.decoded,
            skipped=self.slots.skipped,
            positions=config.positions,
            dtype=dtype,
        )
        spf = checkpoint.config.codec.samples_per_frame
        most_rows = max(config.buckets[-1], config.prefill_rows)
        codec_bytes = config.codec_rows * (2 * self.frame_sizes[-1] * spf + 4) + 64
        self._launcher = Launcher(self.slots, most_rows, max(codec_bytes, 4 * most_rows))
        self._prompt = torch.zeros(config.prefill_rows, self.slots.hidden.shape[1], dtype=dtype, device=self.slots.device)
        self._prefilling: InFlight | None = None
        self._primed: OrderedDict[Reference, tuple[Tensor, Tensor, Tensor]] = OrderedDict()

    def capture(self) -> Iterator[str]:
        """Make every launch ready; yields what has been captured, one after the other. Raises torch.OutOfMemoryError."""
        config = self.config
        codec_buckets = [size for size in config.buckets if size <= config.codec_rows]
        works: list[tuple[Stage | tuple[Stage, int], Callable[[Tensor], tuple[Tensor, ...]], list[int]]] = [
            (Stage.PREFILL, self._prefill_rows, [config.prefill_rows]),
            (Stage.TALKER, self._talker_step, list(config.buckets)),
            (Stage.PREDICTOR, self._predictor_frame, list(config.buckets)),
            *(((Stage.CODEC, frames), partial(self._codec_frames, frames), codec_buckets) for frames in reversed(self.frame_sizes)),
        ]
        for name, work, buckets in works:
            stage, frames = name if isinstance(name, tuple) else (name, 1)
            for bucket in sorted(buckets, reverse=True):
                with torch.inference_mode():
                    self._launcher.add(name, work, bucket)
                yield f"{stage.name.lower()} of {bucket} rows" + (f", {frames} frames" if stage is Stage.CODEC else "")

    @property
    def graph_count(self) -> int:
        """How often `capture` yields."""
        codec = sum(size <= self.config.codec_rows for size in self.config.buckets)
        return 1 + 2 * len(self.config.buckets) + codec * len(self.frame_sizes)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Once all is captured."""
        super().warm_up()

    def launch(self, stage: Stage, slots: list[int], first: list[int], frames: int) -> Launched:
        match stage:
            case Stage.PREFILL:
                self._prefilling = None
                # Much of a prompt is no launch of the Launcher's.
                with failing():
                    left = self.prefill(slots[0])
                return Finished(left) if self._prefilling is None else OnItsWay(self._prefilling, lambda _: left)
            case Stage.TALKER:
                return OnItsWay(self._launcher.launch(stage, slots, self.costs.bucket(len(slots))), self._tokens)
            case Stage.PREDICTOR:
                return OnItsWay(self._launcher.launch(stage, slots, self.costs.bucket(len(slots))), lambda _: None)
            case Stage.CODEC:
                return OnItsWay(self._launcher.launch((stage, frames), slots, self.costs.bucket(len(slots))), _chunks)

    def _talker_step(self, rows: Tensor) -> tuple[Tensor, ...]:
        with dependent(_dependence(rows, self.gpu_talker.stack)):
            return (self.gpu_talker.step(rows),)

    def _predictor_frame(self, rows: Tensor) -> tuple[Tensor, ...]:
        with dependent(_dependence(rows, self.gpu_predictor.stack)):
            self.gpu_predictor.frame(rows)
        return ()

    def _codec_frames(self, frames: int, rows: Tensor) -> tuple[Tensor, ...]:
        return self.gpu_codec.decode(rows, self.slots.codes, frames)

    def _prefill_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        self.gpu_talker.prefill(self._prompt, rows, self.slots.places)
        return ()

    def _tokens(self, arrays: tuple[NDArray[np.generic], ...]) -> list[int | None]:
        end = self.checkpoint.config.predictor.vocab
        return [None if token == end else token for token in arrays[0].tolist()]

    @torch.inference_mode()
    def _compute(self, slot: int, rows: Prefix, start: int) -> None:
        self._prompt[: len(rows)].copy_(embed(self.checkpoint.talker, self.checkpoint.predictor, rows))
        self.slots.place_prompt(list(range(start, start + len(rows))))
        self._prefilling = self._launcher.launch(Stage.PREFILL, [slot] * len(rows), self.config.prefill_rows)

    def _prime(self, slot: int, reference: Reference) -> tuple[list[Callable[[], object]], Callable[[], object]]:
        known = self._primed.get(reference)
        steps: list[Callable[[], object]] = []
        if known is None:
            frames = torch.tensor(reference.frames, dtype=torch.int16)
            # The slot's own codes are still to come: until then the clip's lie there.
            steps.append(lambda: self.slots.codes[slot, : len(frames)].copy_(frames))
            steps += [partial(self._decode, slot, size) for size in self._chunks_of(len(frames))]

        def go_on() -> None:
            if known is not None:
                self.gpu_codec.put_state(slot, known)
            # Put back where it has been dropped meanwhile.
            self._primed[reference] = known or self.gpu_codec.state(slot)
            self._primed.move_to_end(reference)
            if len(self._primed) > MOST_PRIMED:
                self._primed.popitem(last=False)
            last = torch.tensor(reference.frames[-1:], device=self.slots.device)
            summed = embed_frames(self.checkpoint.talker, self.checkpoint.predictor, last)[0]
            self.slots.begin_after(slot, len(reference.frames), summed)

        return steps, go_on

    def _priming_pieces(self, reference: Reference) -> int:
        return 0 if reference in self._primed else 1 + len(self._chunks_of(len(reference.frames)))

    def _chunks_of(self, frames: int) -> list[int]:
        """A clip in the chunk sizes that are captured."""
        sizes = []
        while frames:
            sizes.append(max(size for size in self.frame_sizes if size <= frames))
            frames -= sizes[-1]
        return sizes

    def _decode(self, slot: int, frames: int) -> None:
        self._prefilling = self._launcher.launch((Stage.CODEC, frames), [slot], self.costs.bucket(1))

    def _measure(self, prefix: Prefix) -> None:
        """Every graph, on the idle slot."""
        codec = [((Stage.CODEC, frames), Stage.CODEC, frames) for frames in self.frame_sizes]
        for name, stage, frames in [(Stage.TALKER, Stage.TALKER, 1), (Stage.PREDICTOR, Stage.PREDICTOR, 1), *codec]:
            for bucket in self.config.buckets:
                if stage is not Stage.CODEC or bucket <= self.config.codec_rows:
                    self.costs.record(stage, bucket, frames, self.timed(name, bucket))
        self.costs.record(Stage.PREFILL, 1, 1, self.timed(Stage.PREFILL, self.config.prefill_rows))

    def timed(self, name: object, bucket: int, times: int = TIMED) -> float:
        """Seconds that a captured launch of idle rows takes: the median of so many, after one that does not count."""
        seconds = []
        for _ in range(1 + times):
            begin_s = time.monotonic()
            flight = self._launcher.launch(name, [], bucket)
            while not flight.done():
                pass
            seconds.append(flight.results().seconds or time.monotonic() - begin_s)
        return statistics.median(seconds[1:])


def _dependence(rows: Tensor, stack: Stack) -> bool:
    """A frame is four hundred launches of a few microseconds: each begins before the one before it is over. cuBLAS has no such launches."""
    return streamed(len(rows), stack.layers[0].qkv.shape)


def _chunks(arrays: tuple[NDArray[np.generic], ...]) -> list[NDArray[np.int16] | None]:
    """Copies: the pinned memory is written again a few launches later."""
    pcm, broken = arrays
    return [None if bad else samples.astype(np.int16) for samples, bad in zip(pcm, broken.tolist(), strict=True)]
