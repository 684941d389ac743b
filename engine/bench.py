"""`python -m engine bench`: what a frame costs, by module, batch and threads. Real-time factors: below 1 keeps up with speech."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config import LATENCY
from engine.messages import Sampling
from engine.model.checkpoint import load_checkpoint
from engine.model.prompt import AUTO, build_prefix
from engine.stages import Stages

ROUNDS = 30
CODEC_FRAMES = 4


def run(model: Path) -> None:
    """Print a table for 1 and 2 threads."""
    checkpoint = load_checkpoint(model)
    stages = Stages(checkpoint, LATENCY)
    config = checkpoint.config
    frame_s = config.codec.samples_per_frame / config.codec.sample_rate
    prefix = build_prefix(config, checkpoint.tokenizer, voice=None, language=AUTO, instructions="")
    print(f"{checkpoint.name}: real-time factor of one stream (median of {ROUNDS}); codec in chunks of {CODEC_FRAMES} frames")
    print(f"{'threads':>7} {'streams':>7} {'Talker':>8} {'Predictor':>9} {'Codec':>8} {'together':>8}")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 4):
            slots = [stages.open(prefix, Sampling(), row, may_end=False)[0] for row in range(rows)]
            costs = [
                median_s(lambda slots=slots: stages.talker(slots)),  # type: ignore[misc]
                median_s(lambda slots=slots: stages.predictor(slots)),  # type: ignore[misc]
                median_s(lambda slots=slots: stages.codec(slots, [0] * len(slots), CODEC_FRAMES)) / CODEC_FRAMES,  # type: ignore[misc]
            ]
            talker, predictor, codec = (cost / frame_s for cost in costs)
            print(f"{threads:7} {rows:7} {talker:8.3f} {predictor:9.3f} {codec:8.3f} {talker + predictor + codec:8.3f}")
            for slot in slots:
                stages.close(slot)


def median_s(run: Callable[[], object]) -> float:
    """Median seconds of `run`, after three runs to warm up."""
    times = []
    for _ in range(3 + ROUNDS):
        begin_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[3:])
