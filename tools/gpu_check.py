"""On a GPU: does the engine say what it says on a CPU, and what does each launch cost? `make gpu-check`.

Each fixture checkpoint speaks on the CPU and, in float32, through captured graphs; then a checkpoint of the released shape with random
weights is captured in bfloat16, has to say the same whatever its neighbours do, and every graph is timed. The table goes to standard output."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gpu_profile import show

from engine.config import GPU_LATENCY, EngineConfig
from engine.gpu.device import captured, use
from engine.gpu.stages import GpuStages
from engine.kernels.gpu import attention, by_kernel, frame_attention, frame_pass, linear, norm
from engine.loop import EngineLoop
from engine.messages import Append, AudioChunk, Cancel, Credit, Done, Event, Failed, Finish, Open, Sampling, SpeechRequest
from engine.model.checkpoint import load_checkpoint
from engine.model.prompt import AUTO, build_prefix
from engine.scheduler import Stage
from engine.stages import BaseStages, Stages

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "checkpoints"
SMALL = EngineConfig(slots=8, positions=256, buckets=(1, 2, 4, 8), chunk_frames=(1, 2, 4))
TEXTS = ["one two three four", "the quick brown fox jumps over the lazy dog", "five"]


def speak(
    stages: BaseStages, sampling: list[Sampling], *, gap_turns: int = 0, frames: int = 24, cancelled: Sequence[int] = (), cancel_turn: int = 0
) -> dict[int, tuple[str, np.ndarray]]:
    """Each text with its sampling through the loop, `gap_turns` turns apart: why it ended and its samples. Those `cancelled` are, at a turn."""
    events: list[Event] = []
    loop = EngineLoop(stages, stages.config, lambda _, event: events.append(event))
    for number, one in enumerate(sampling):
        request = SpeechRequest(pace="file", max_frames=frames, sampling=one)
        for command in (Open(loop.epoch, number, request), Append(loop.epoch, number, TEXTS[number % len(TEXTS)]), Finish(loop.epoch, number)):
            loop.handle(b"", command, time.monotonic())
        for _ in range(gap_turns):
            loop.turn(time.monotonic())
    turns = 0
    while not loop.idle:
        if turns == cancel_turn:
            for number in cancelled:
                loop.handle(b"", Cancel(loop.epoch, number), time.monotonic())
        loop.turn(time.monotonic())
        turns += 1
    said = {}
    for number in range(len(sampling)):
        own = [event for event in events if getattr(event, "utterance", -1) == number]
        last = own[-1]
        why = last.reason if isinstance(last, Done) else f"failed: {last.message}" if isinstance(last, Failed) else str(last)
        said[number] = why, np.frombuffer(b"".join(event.pcm for event in own if isinstance(event, AudioChunk)), np.int16)
    return said


def _error(wanted: tuple[str, np.ndarray], found: tuple[str, np.ndarray]) -> int:
    same = wanted[0] == found[0] and len(wanted[1]) == len(found[1]) > 0
    return int(np.abs(wanted[1].astype(int) - found[1]).max()) if same else -1


def check_fixtures(device: torch.device) -> int:
    bad = 0
    for folder in sorted(FIXTURES.iterdir()):
        cpu = load_checkpoint(folder)
        if cpu.config.clones_voices:
            continue
        stages = Stages(cpu, SMALL)
        gpu = captured(GpuStages(load_checkpoint(folder, device=device), SMALL))
        gpu.warm_up()
        for greedy in (True, False):
            # Every bucket by itself: each is another graph, and one row takes other kernels than many.
            for count in (1, 2, 4, 6):
                sampling = [Sampling(seed=seed, greedy=greedy) for seed in range(count)]
                wanted, found = speak(stages, sampling), speak(gpu, sampling)
                errors = [_error(wanted[number], found[number]) for number in wanted]
                ok = all(0 <= error <= 4 for error in errors)
                bad += not ok
                what = f"{folder.name} {'greedy' if greedy else 'drawn'}, {count} at once"
                print(f"{'ok  ' if ok else 'FAIL'} {what}: largest difference of samples, by utterance (-1: other speech): {errors}")
    return bad


def check_identity(folder: Path, device: torch.device) -> int:
    """In bfloat16, with one bucket for whatever is ready: what an utterance says depends on no neighbour, bit by bit, nor on what a neighbour
    does; nor on a race between kernels of which one begins before the other has ended."""
    bad = 0
    checkpoint = load_checkpoint(folder, dtype=torch.bfloat16, codec_dtype=torch.float32, device=device)
    for bucket in (1, 8, 32, 64):
        config = replace(GPU_LATENCY, slots=bucket, positions=256, buckets=(bucket,), first_frames=1, chunk_frames=(1,), prefill_rows=32)
        stages = captured(GpuStages(checkpoint, config))
        stages.warm_up()
        seeds = [Sampling(seed=seed) for seed in range(bucket)]
        wanted = speak(stages, seeds)
        others = [*seeds[: bucket // 2], *(Sampling(seed=1000 + seed) for seed in range(bucket - bucket // 2))]
        alone = speak(stages, seeds[:1])
        again = [speak(stages, seeds) for _ in range(3)]
        mixed = speak(stages, others, cancelled=range(bucket // 2, bucket), cancel_turn=40) if bucket > 1 else wanted
        late = speak(stages, seeds, gap_turns=3)
        same = {
            "said again": all(_same(wanted, one, bucket) for one in again),
            "alone": _same(wanted, alone, 1),
            "among others that are cancelled": _same(wanted, mixed, bucket // 2),
            "begun one after the other": _same(wanted, late, bucket),
        }
        bad += sum(not ok for ok in same.values())
        print(f"{'ok  ' if all(same.values()) else 'FAIL'} bfloat16, launches of {bucket} rows, bit by bit the same: {same}")
    return bad


# Rounding alone puts bfloat16 off by 2^-9 / sqrt(3) of a number in the mean square, at seven places a layer; how much attention makes of that
# depends on the weights. So the measure is plain PyTorch in bfloat16: the kernels round less often, and may be off by no more than that is.
MARGIN = 1.1
KERNELS = (attention, frame_attention, frame_pass, linear, norm)


def check_bfloat16(folder: Path, device: torch.device, frames: int = 24) -> int:
    """Talker and Code Predictor in bfloat16, by the kernels and by their twins, against float32, of a checkpoint whose weights are bfloat16:
    all are given the tokens that float32 draws."""
    config = replace(GPU_LATENCY, slots=8, positions=256, buckets=(1,), chunk_frames=(1,), first_frames=1)
    made: list[GpuStages] = []
    for dtype, twins in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        with _twins(twins):
            stages = GpuStages(load_checkpoint(folder, dtype=dtype, codec_dtype=torch.float32, device=device), config)
            made.append(captured(stages))
    wide, *narrow = made
    config_of = wide.checkpoint.config
    prefix = build_prefix(config_of, wide.checkpoint.tokenizer, voice=None, language=AUTO, instructions="")
    text = wide.checkpoint.tokenizer.encode(TEXTS[1] * 3)
    errors: dict[tuple[str, int], list[float]] = {(name, which): [] for name in ("Talker", "Code Predictor") for which in (0, 1)}
    for stages in made:
        slot, _ = stages.open(prefix, Sampling(seed=1), 1, may_end=False)
        assert slot == 0
        stages.write_text(slot, 0, text[:frames])
    for frame in range(frames):
        for stage in (Stage.TALKER, Stage.PREDICTOR):
            for stages in made:
                pending = stages.launch(stage, [0], [frame], 1)
                while not pending.done():
                    pass
            for which, stages in enumerate(narrow):
                if stage is Stage.TALKER:
                    errors["Talker", which].append(_relative(stages.slots.hidden[0], wide.slots.hidden[0]))
                    stages.slots.token.copy_(wide.slots.token)
                else:
                    for name in ("keys", "values"):
                        mine, right = (getattr(one.gpu_predictor, name)[-1, 0, :, :2] for one in (stages, wide))
                        errors["Code Predictor", which].append(_relative(mine, right))
                    stages.slots.frame_sum.copy_(wide.slots.frame_sum)
                stages.slots.codes.copy_(wide.slots.codes)
                stages.slots.seen.copy_(wide.slots.seen)
    bad = 0
    for name in ("Talker", "Code Predictor"):
        mine, plain = (sum(errors[name, which]) / len(errors[name, which]) for which in (0, 1))
        good = 0 < mine <= MARGIN * plain
        bad += not good
        print(f"{'ok  ' if good else 'FAIL'} bfloat16, {name}, last layer: off by {mine:.2e} of its root mean square, plain PyTorch by {plain:.2e}")
    return bad


@contextmanager
def _twins(wanted: bool) -> Iterator[None]:
    """Inside, the kernels' twins are captured instead of them."""
    if wanted:
        for module in KERNELS:
            module.by_kernel = lambda x: False
    yield
    for module in KERNELS:
        module.by_kernel = by_kernel


def _relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt())


def soak(folder: Path, device: torch.device, minutes: float) -> int:
    """Utterances that begin, are cancelled, and end at random for minutes: afterwards every slot is free, no memory was taken, and an
    utterance says what it said before."""
    config = replace(GPU_LATENCY, slots=64, buckets=(1, 2, 4, 8, 16, 32, 64), chunk_frames=(1, 2, 4))
    stages = captured(GpuStages(load_checkpoint(folder, dtype=torch.bfloat16, codec_dtype=torch.float32, device=device), config))
    stages.warm_up()
    before, held = speak(stages, [Sampling(seed=5)]), torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    counts = {"begun": 0, "cancelled": 0, "ended": 0, "refused": 0, "failed": 0}
    running: set[int] = set()

    def heed(_: bytes, event: Event) -> None:
        if isinstance(event, Done):
            counts["cancelled" if event.reason == "cancelled" else "ended"] += 1
        elif isinstance(event, Failed):
            counts["refused" if event.code == "overloaded" else "failed"] += 1
        if isinstance(event, Done | Failed):
            running.discard(event.utterance)

    loop = EngineLoop(stages, config, heed)
    chance = random.Random(1)
    end_s = time.monotonic() + 60 * minutes
    while time.monotonic() < end_s or not loop.idle:
        now_s = time.monotonic()
        if now_s < end_s and len(running) < 90 and chance.random() < 0.05:
            number = counts["begun"]
            counts["begun"] += 1
            running.add(number)
            request = SpeechRequest(pace=chance.choice(["file", "live"]), max_frames=chance.randrange(1, 120), sampling=Sampling(seed=number))
            text = " ".join(chance.choice(TEXTS) for _ in range(chance.randrange(1, 6)))
            for command in (Open(loop.epoch, number, request), Append(loop.epoch, number, text), Finish(loop.epoch, number)):
                loop.handle(b"", command, now_s)
        if running and chance.random() < 0.01:
            loop.handle(b"", Cancel(loop.epoch, chance.choice(sorted(running))), now_s)
        for number in running:
            loop.handle(b"", Credit(loop.epoch, number, 10**12), now_s)
        wait_s = loop.turn(now_s)
        if wait_s:
            time.sleep(min(wait_s, 0.002))
    grown = (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0) - held
    again = _same(before, speak(stages, [Sampling(seed=5)]), 1)
    good = again and stages.free_slots == config.slots and not running and not counts["failed"] and grown <= 0
    free = f"{stages.free_slots} of {config.slots} slots free"
    print(f"{'ok  ' if good else 'FAIL'} {minutes:g} minutes of soak: {counts}, {free}, {grown} bytes more, says the same: {again}")
    return not good


def _same(wanted: dict[int, tuple[str, np.ndarray]], found: dict[int, tuple[str, np.ndarray]], first: int) -> bool:
    pairs = [(wanted[number], found[number]) for number in range(first)]
    return all(one[0] == other[0] and len(one[1]) > 0 and np.array_equal(one[1], other[1]) for one, other in pairs)


def time_graphs(folder: Path, config: EngineConfig, device: torch.device) -> None:
    begin_s = time.monotonic()
    stages = GpuStages(load_checkpoint(folder, dtype=torch.bfloat16, codec_dtype=torch.float32, device=device), config)
    torch.cuda.synchronize()
    loaded_s = time.monotonic()
    print(f"loaded in {loaded_s - begin_s:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
    slow: list[tuple[float, str]] = []
    at_s = loaded_s
    for what in stages.capture():
        slow.append((time.monotonic() - at_s, what))
        at_s = time.monotonic()
    print(f"{len(slow)} graphs captured in {at_s - loaded_s:.1f} s, {torch.cuda.memory_reserved() / 2**30:.1f} GiB; slowest: {sorted(slow)[-4:]}")
    with torch.inference_mode():
        stages._measure(stages._warm_prefixes())
    buckets = [size for size in config.buckets]
    print("ms by rows        " + " ".join(f"{size:>7}" for size in buckets))
    for stage in (Stage.TALKER, Stage.PREDICTOR):
        print(f"{stage.name.lower():18}" + " ".join(f"{stages.costs.estimate(stage, size) * 1000:7.3f}" for size in buckets))
    for frames in stages.frame_sizes:
        costs = [stages.costs.estimate(Stage.CODEC, size, frames) * 1000 for size in buckets if size <= config.codec_rows]
        print(f"codec, {frames:2} frames   " + " ".join(f"{cost:7.3f}" for cost in costs))
    print(f"prefill of {config.prefill_rows} rows: {stages.costs.estimate(Stage.PREFILL, 1) * 1000:.3f} ms")
    for stage in (Stage.TALKER, Stage.PREDICTOR):
        for size in (1, 32):
            show(stages, stage, size)
    for count in (1, 32):
        sampling = [Sampling(seed=seed) for seed in range(count)]
        begin_s = time.monotonic()
        said = speak(stages, sampling, frames=50)
        took_s = time.monotonic() - begin_s
        audio_s = sum(len(samples) for _, samples in said.values()) / 24000
        ends = sorted({why for why, _ in said.values()})
        print(f"{count} downloads of 50 frames: {audio_s:.1f} s of audio in {took_s:.2f} s, {audio_s / took_s:.0f} x real time; ends: {ends}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; default: random weights in the shape of 1.7B-CustomVoice")
    parser.add_argument("--only", choices=("fixtures", "identity", "bfloat16", "times", "soak"), help="one part of it")
    parser.add_argument("--minutes", type=float, default=4.0, help="of soak; it runs only when asked for (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU here; run this on a machine with one", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    use(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    bad = check_fixtures(device) if arguments.only in (None, "fixtures") else 0
    if arguments.only == "fixtures":
        return 1 if bad else 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model
        if folder is None:
            from engine.random_checkpoint import make

            folder = Path(scratch) / "model"
            begin_s = time.monotonic()
            make(folder, "1.7B-CustomVoice", 0)
            print(f"random checkpoint made in {time.monotonic() - begin_s:.1f} s")
        if arguments.only in (None, "identity"):
            bad += check_identity(folder, device)
        if arguments.only in (None, "bfloat16"):
            bad += check_bfloat16(folder, device)
        if arguments.only == "soak":
            bad += soak(folder, device, arguments.minutes)
        if arguments.only in (None, "times"):
            time_graphs(folder, GPU_LATENCY, device)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
