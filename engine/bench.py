"""`python -m engine bench`: what a frame costs here, by stage and streams, with the kernels and with their torch twins.

Twin and kernel take turns in one process; each figure is the least processor time of its runs, so that other load disturbs little and
both alike. Then what the scheduler's own choice of a launch costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from engine import turns
from engine.config import LATENCY
from engine.messages import Sampling
from engine.model.checkpoint import load_checkpoint
from engine.model.prompt import AUTO, build_prefix
from engine.stages import Stages

ROUNDS = 20
CODEC_FRAMES = (1, 4)
STREAMS = (1, 2, 4)


def run(model: Path) -> None:
    """Print CPU milliseconds a frame of all streams together, one thread, and the real-time factor: below 1 keeps up with speech."""
    torch.set_num_threads(1)
    began_s = time.perf_counter()
    checkpoint = load_checkpoint(model)
    stages = Stages(checkpoint, LATENCY)
    ready_s = time.perf_counter() - began_s
    print(f"{checkpoint.name}: ready after {ready_s:.1f} s; CPU milliseconds a frame of all streams, one thread, least of {ROUNDS}")
    config = checkpoint.config
    frame_ms = 1e3 * config.codec.samples_per_frame / config.codec.sample_rate
    prefix = build_prefix(config, checkpoint.tokenizer, voice=None, language=AUTO, instructions="")
    kernels = stages.codec_stage.codec.kernel is not None
    print(f"{'streams':>7}  {'stage':<18} {'torch':>8} {'kernels':>8} {'ratio':>6}")
    for streams in STREAMS:
        slots = [stages.open(prefix, Sampling(), row, may_end=False)[0] for row in range(streams)]
        work: dict[str, tuple[Callable[[], object], int]] = {
            "Talker": (partial(stages.talker, slots), 1),
            "Predictor": (partial(stages.predictor, slots), 1),
            **{f"Codec by {frames}": (partial(stages.codec, slots, [0] * streams, frames), frames) for frames in CODEC_FRAMES},
        }
        least: dict[tuple[str, bool], float] = {}
        for _ in range(ROUNDS):
            for native in (False, True) if kernels else (False,):
                with nullcontext() if native else _twins(stages):
                    for name, (launch, frames) in work.items():
                        cost_ms = _cost_ms(launch) / frames
                        least[name, native] = min(cost_ms, least.get((name, native), cost_ms))
        for name in work:
            _print(streams, name, least[name, False], least.get((name, True)))
        whole = [
            sum(least[name, native] for name in (*list(work)[:2], f"Codec by {CODEC_FRAMES[-1]}"))
            for native in (False, True)
            if (name, native) in least
        ]
        _print(streams, "together", whole[0], whole[1] if kernels else None)
        print(f"{'':7}  {'real-time factor':<18} " + " ".join(f"{cost_ms / frame_ms:8.3f}" for cost_ms in whole))
        for slot in slots:
            stages.close(slot)
    print()
    turns.run()


def _print(streams: int, name: str, twin_ms: float, kernel_ms: float | None) -> None:
    print(f"{streams:7}  {name:<18} {twin_ms:8.2f}" + (f" {kernel_ms:8.2f} {twin_ms / kernel_ms:5.1f}x" if kernel_ms else ""))


@contextmanager
def _twins(stages: Stages) -> Iterator[None]:
    """The torch twins run while this is active."""
    talker, predictor, codec, stage = stages.talker_stage.talker, stages.predictor_stage.predictor, stages.codec_stage.codec, stages.talker_stage
    held = talker.kernel, predictor.kernel, predictor.frame_kernel, codec.kernel, stage.kernel
    talker.kernel = predictor.kernel = predictor.frame_kernel = codec.kernel = stage.kernel = None
    try:
        yield
    finally:
        talker.kernel, predictor.kernel, predictor.frame_kernel, codec.kernel, stage.kernel = held


def _cost_ms(launch: Callable[[], object]) -> float:
    begin_s = time.thread_time()
    launch()
    return (time.thread_time() - begin_s) * 1e3
