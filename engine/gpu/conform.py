"""`python -m engine conform DIR --device cuda`: does a GPU say what the official code says?

Graphs let nobody listen from inside. But a token that is not the official code's would be another sound, so it is enough to hear:
greedy cases of every variant and layout, in the checkpoint's own dtype, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import conform
from engine.config import EngineConfig
from engine.conform import Report, case_rows
from engine.gpu.device import captured
from engine.gpu.stages import GpuStages
from engine.loop import EngineLoop
from engine.messages import AudioChunk, Event, Sampling
from engine.model.checkpoint import Checkpoint
from engine.model.prompt import CloneVoice


def run(folder: Path, only: list[str], device: torch.device) -> int:
    """See `engine.conform.run`."""
    return conform.run(folder, only, check_sound, device)


def check_sound(
    checkpoint: Checkpoint,
    golden: dict[str, np.ndarray],
    meta: dict[str, Any],
    prompts: dict[str, CloneVoice],
) -> Report | None:
    """A greedy case by what is heard; None for another one."""
    kwargs = meta.get("generate_kwargs")
    if kwargs is None or kwargs["do_sample"] or kwargs["subtalker_dosample"]:
        return None
    specs = case_rows(checkpoint, meta["call"], prompts)
    penalty = kwargs["repetition_penalty"]
    config = EngineConfig(slots=4, positions=512, buckets=(1, 2, 4), first_frames=1, chunk_frames=(1, 2, 5))
    events: list[Event] = []
    loop = EngineLoop(captured(GpuStages(checkpoint, config)), config, lambda client, event: events.append(event))
    for number, spec in enumerate(specs):
        uncovered = spec.reference.uncovered if spec.reference is not None and not spec.body else 0
        sampling = Sampling(greedy=True, repetition_penalty=penalty)
        closed = len(spec.target) < uncovered
        begin = spec.target[:uncovered]
        voice = loop.open_tokens(number, spec.prefix, spec.body, sampling, meta["steps"], 0.0, reference=spec.reference, text=begin, last=closed)
        if spec.body:
            voice.utterance.text_closed = True
        elif not voice.utterance.text_closed:
            loop.feed_tokens(voice, spec.target[uncovered:], last=True)
    time_s = 0.0
    while not loop.idle:
        time_s += 0.001
        loop.turn(time_s)
    report = Report()
    for row, spec in enumerate(specs):
        heard = len(spec.reference.frames) if spec.reference is not None else 0
        found = golden[f"wav_before_cut_{row}"][heard * checkpoint.config.codec.samples_per_frame :] if heard else golden[f"wav_{row}"]
        pcm = b"".join(event.pcm for event in events if isinstance(event, AudioChunk) and event.utterance == row)
        wav = np.frombuffer(pcm, np.int16).astype(np.float32) / 32767
        report.close(f"row {row}: wav_{row}", wav[: len(found)], found, "wav")
    return report
