"""Measures the GPU's codec decoder on the card it runs on: errors, milliseconds of one CUDA graph, its slowest kernels, other tilings.

    PYTHONPATH=. python tools/gpu_codec.py

Weights are random, in the released checkpoints' shape. The whole output also goes to $OUT/gpu_codec.txt where OUT is set."""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.gpu.codec import GpuCodec
from engine.kernels.gpu import conv as convolutions
from engine.kernels.gpu.conv import Columns, Convolution, Snake, Tiling
from engine.model.codec import CodecDecoder, CodecState
from engine.model.config import load_config
from engine.model.layers import fuse
from engine.random_checkpoint.files import write_small_files
from engine.random_checkpoint.weights import PIECE, Recipe

CUDA = torch.device("cuda")
BATCHES, FRAMES = (1, 8, 32, 64), (1, 2, 4, 8, 12)
POSITIONS = 512
CANDIDATES = {
    "few rows": [
        Tiling(16, 16, 128, 4, 4),
        Tiling(16, 16, 128, 4, 6),
        Tiling(16, 16, 256, 4, 4),
        Tiling(16, 16, 256, 2, 4),
        Tiling(16, 32, 128, 4, 6),
        Tiling(16, 64, 64, 4, 6),
    ],
    "some rows": [
        Tiling(16, 16, 128, 4, 4),
        Tiling(16, 32, 64, 4, 6),
        Tiling(32, 16, 64, 4, 5),
        Tiling(32, 32, 64, 4, 5),
        Tiling(32, 32, 32, 4, 6),
        Tiling(64, 32, 64, 4, 5),
        Tiling(64, 64, 64, 4, 4),
    ],
    "many rows": [
        Tiling(128, 64, 64, 4, 3),
        Tiling(128, 64, 64, 4, 4),
        Tiling(128, 64, 32, 4, 4),
        Tiling(128, 128, 32, 8, 4),
        Tiling(128, 128, 64, 8, 3),
        Tiling(128, 128, 64, 8, 4),
        Tiling(256, 64, 64, 8, 3),
        Tiling(128, 256, 64, 8, 3),
    ],
}
lines: list[str] = []


def say(text: str) -> None:
    lines.append(text)
    print(text, flush=True)


@dataclass(frozen=True)
class Call:
    """One convolution of a launch, as `conv` was called."""

    x: Columns
    conv: Convolution
    columns: int
    out: Columns
    residual: Columns | None
    raw: Tensor | None
    snake: Snake | None
    broken: Tensor | None
    act: int

    @property
    def rows(self) -> int:
        return self.x.data.shape[0] * self.columns

    @property
    def gflop(self) -> float:
        return 2e-9 * self.rows * self.conv.weight.numel()

    def __str__(self) -> str:
        c = self.conv
        return f"{self.rows} x {c.outputs} x {c.taps}*{c.channels}{' +r' if self.residual else ''}{('', ' snake', ' gelu', ' pcm')[self.act]}"

    def key(self) -> tuple[int, ...]:
        return self.rows, self.conv.outputs, self.conv.channels, self.conv.taps, self.act, int(self.residual is not None)


def random_decoder() -> CodecDecoder:
    """The released shape in float32 on the card, not yet fused."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_small_files(folder, "1.7B-CustomVoice")
        recipe, config = Recipe(folder, 0), load_config(folder)
    with torch.device("meta"):
        decoder = CodecDecoder(config.codec)
    filled = {}
    for key, parameter in decoder.named_parameters():
        shape = tuple(parameter.shape)
        pieces = [recipe.piece(f"decoder.{key}", shape, begin, torch.float32) for begin in range(0, parameter.numel(), PIECE)]
        filled[key] = torch.cat(pieces).view(shape).to(CUDA)
    decoder.load_state_dict(filled, assign=True)
    return decoder.requires_grad_(False).eval()


def fused(decoder: CodecDecoder, dtype: torch.dtype) -> CodecDecoder:
    made = copy.deepcopy(decoder).to(dtype)
    # It makes a row of ones on the default device.
    with torch.device(CUDA):
        fuse(made)
    return made


def random_codes(codec: GpuCodec, slots: int) -> Tensor:
    config = codec.config
    return torch.randint(0, config.codebook_size, (slots, POSITIONS, config.groups), dtype=torch.int16, device=CUDA)


def errors(decoder: CodecDecoder, reference: CodecDecoder) -> None:
    """Three slots, 40 frames in chunks, against one pass of the model's decoder in float64."""
    torch.manual_seed(1)
    slots = torch.arange(3, dtype=torch.int32, device=CUDA)
    codes = None
    expected = torch.empty(0)
    for dtype in (torch.float32, torch.bfloat16):
        codec = GpuCodec(decoder, 4, 12, positions=POSITIONS, dtype=dtype)
        codes = random_codes(codec, 4) if codes is None else codes
        if not len(expected):
            expected = _whole(reference, codes[:3, :40].long())
            native = _whole(fused(random_decoder(), torch.bfloat16), codes[:3, :40].long()).double()
            say(f"loudest {float(expected.abs().max()):.3f}; the model's decoder in bfloat16: {_off(native, expected)}")
        for chunks in ((2, 2, 12, 12, 12), (1, 4, 8, 12, 12, 3)):
            codec.reset([0, 1, 2])
            heard, broken = zip(*(codec.decode(slots, codes, frames) for frames in chunks), strict=True)
            assert not any(bool(part.any()) for part in broken)
            say(f"{dtype} {chunks}: {_off(torch.cat(heard, 1).double() / 32767, expected)}")


def _whole(decoder: CodecDecoder, codes: Tensor) -> Tensor:
    dtype = decoder.quantizer.tables.dtype
    parts = [torch.zeros(len(codes), *shape, dtype=dtype, device=CUDA) for shape in decoder.state_shapes]
    with torch.inference_mode():
        samples: Tensor = decoder(codes, CodecState(parts, torch.zeros(len(codes), dtype=torch.int64, device=CUDA)))
    return samples


def _off(heard: Tensor, expected: Tensor) -> str:
    difference = heard - expected
    noise = float(difference.square().mean().sqrt() / expected.square().mean().sqrt())
    return f"largest error {float(difference.abs().max()):.2e}, rms {noise:.2e} of the sound's"


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, most: int = 30) -> float:
    """Median of single replays."""
    times = []
    begin_s = time.monotonic()
    for number in range(most):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number > 2:
            times.append(start.elapsed_time(end))
        if number > 8 and time.monotonic() - begin_s > 0.5:
            break
    return statistics.median(times)


def graphs(codec: GpuCodec, codes: Tensor) -> None:
    say("ms of one graph" + "".join(f"{frames:>9} fr" for frames in FRAMES))
    for batch in BATCHES:
        slots = torch.arange(batch, dtype=torch.int32, device=CUDA)
        row = []
        for frames in FRAMES:
            codec.decoded.fill_(100)
            graph = captured(lambda slots=slots, frames=frames: codec.decode(slots, codes, frames))  # type: ignore[misc]
            row.append(replay_ms(graph))
            del graph
            torch.cuda.empty_cache()
        say(f"batch {batch:>9}" + "".join(f"{ms:12.3f}" for ms in row))


def recorded(codec: GpuCodec, codes: Tensor, batch: int, frames: int) -> list[Call]:
    """The convolutions of one launch, in order; their buffers stay alive."""
    calls: list[Call] = []
    launch = convolutions._launch

    def listen(x, conv, columns, out, residual, raw, snake, broken, act, tile):  # type: ignore[no-untyped-def]
        calls.append(Call(x, conv, columns, out, residual, raw, snake, broken, act))
        launch(x, conv, columns, out, residual, raw, snake, broken, act, tile)

    convolutions._launch = listen
    try:
        codec.decode(torch.arange(batch, dtype=torch.int32, device=CUDA), codes, frames)
    finally:
        convolutions._launch = launch
    return calls


def slowest(codec: GpuCodec, codes: Tensor, batch: int, frames: int) -> None:
    """Kernels of one launch, convolutions by what they multiply."""
    slots = torch.arange(batch, dtype=torch.int32, device=CUDA)
    calls = recorded(codec, codes, batch, frames)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        codec.decode(slots, codes, frames)
        torch.cuda.synchronize()
    events = sorted((e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    order = iter(calls)
    named = [(str(next(order)) if e.name.startswith("conv_kernel") else e.name[:40], e.time_range.elapsed_us()) for e in events]
    sums: dict[str, list[float]] = {}
    for name, us in named:
        sums.setdefault(name, []).append(us)
    total = sum(us for _, us in named)
    say(f"{batch} x {frames}: {len(named)} kernels, {total:.0f} us, of these convolutions {sum(us for n, us in named if ' x ' in n):.0f}")
    work = {str(call): call.gflop for call in calls}
    for name, each in sorted(sums.items(), key=lambda item: -sum(item[1]))[:10]:
        speed = f"{work[name] * len(each) / sum(each) * 1e3:5.0f} TFLOP/s" if name in work else ""
        say(f"  {sum(each):8.1f} us in {len(each):2}  {name:44}{speed}")


def tilings(codec: GpuCodec, codes: Tensor, batch: int, frames: int, count: int) -> None:
    """The heaviest convolutions of a launch in other tilings; small ones rotate over copies of their weights, as none stays in the cache."""
    unique = {call.key(): call for call in recorded(codec, codes, batch, frames) if call.act != 3}
    for call in sorted(unique.values(), key=lambda call: -call.gflop)[:count]:
        size = call.conv.weight.numel() * 2
        copies = 1 if call.rows > 4096 else min(24, -(-150_000_000 // size))
        weights = [replace(call.conv, weight=call.conv.weight.clone()) for _ in range(copies)]
        kind = "few rows" if call.rows <= 16 else "some rows" if call.rows <= 4096 else "many rows"
        found = []
        for tile in CANDIDATES[kind]:

            def work(tile: Tiling = tile, call: Call = call, weights: list[Convolution] = weights) -> None:
                for conv in weights:
                    c = call
                    convolutions._launch(c.x, conv, c.columns, c.out, c.residual, c.raw, c.snake, c.broken, c.act, tile)

            found.append((replay_ms(captured(work), 12) / copies * 1e3, tile))
        own = convolutions.tiling(call.conv, call.rows)
        best = sorted(found, key=lambda pair: pair[0])[:4]
        shown = "  ".join(f"{t.rows}/{t.outputs}/{t.inputs}/{t.warps}w/{t.stages}{'*' if t == own else ''} {us:.1f}" for us, t in best)
        say(f"  {call!s:40} {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["errors", "graphs", "slowest", "tilings"], help="one part of it")
    only = parser.parse_args().only
    begin_s = time.monotonic()
    torch.backends.cudnn.allow_tf32 = False
    plain = random_decoder()
    decoder = fused(plain, torch.float32)
    if only in (None, "errors"):
        errors(decoder, fused(plain, torch.float64))
    codec = GpuCodec(decoder, max(BATCHES) + 1, max(FRAMES), positions=POSITIONS, dtype=torch.bfloat16)
    codes = random_codes(codec, max(BATCHES) + 1)
    compiling_s = time.monotonic()
    for batch, frames in ((1, 2), (32, 12)):
        codec.decode(torch.arange(batch, dtype=torch.int32, device=CUDA), codes, frames)
    torch.cuda.synchronize()
    say(f"first launches of (1, 2) and (32, 12), compiling: {time.monotonic() - compiling_s:.1f} s")
    if only in (None, "graphs"):
        graphs(codec, codes)
    for batch, frames, count in ((1, 2, 8), (32, 12, 7)):
        if only in (None, "slowest"):
            slowest(codec, codes, batch, frames)
        if only in (None, "tilings"):
            say(f"tilings {batch} x {frames}, rows/outputs/inputs/warps/stages, us each (* = chosen)")
            tilings(codec, codes, batch, frames, count)
        torch.cuda.empty_cache()
    say(f"{time.monotonic() - begin_s:.0f} s")
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "gpu_codec.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
