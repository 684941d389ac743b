"""EngineConfig: the numbers that steer the engine, in profiles that differ in numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EngineConfig:
    """Sizes are rows, frames (80 ms at the released rates) or positions; times are seconds."""

    slots: int = 16
    positions: int = 2048
    """KV positions of a slot: prompt and frames of one utterance (2,048: about 160 s)."""
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Batch sizes a launch may have; a smaller ready set is padded up with an idle slot."""
    codec_rows: int = 64
    """Rows of a codec launch at most: it is the launch that grows most with them."""
    first_frames: int = 1
    """Frames in an utterance's first codec chunk."""
    chunk_frames: tuple[int, ...] = (1, 2, 4, 8)
    """Sizes of later codec chunks, smallest first."""
    prefill_rows: int = 16
    """Rows of a prompt computed at once; a longer one is put in piece by piece, with other launches between."""
    priming_frames: int = 4
    """Frames of a voice clip decoded at once, when the codec is brought to where the clip ends."""
    ahead_s: float = 3.0
    """How far beyond the heard position audio is made for a live listener."""
    calm_s: float = math.inf
    """While each live listener has so much slack, the device is kept free for whoever comes: no launch waits behind another, none is long, and
    newcomers are served without company. Infinite: never."""
    safety_s: float = 0.02
    """Subtracted from every slack: scheduling, transport and clock."""
    idle_flush_s: float = 0.6
    """A sender silent for this long is taken to pause: what is in hand is spoken."""
    word_pause_s: float = 1.2
    """After a pause this long a last word without a space or mark behind it counts as written to its end."""
    stall_slack_s: float = 0.2
    """A row that waits for text with less slack than this is spoken to its end (design 3.2a)."""
    trim_onset: bool = True
    """Drop the silence before an utterance's first sound."""
    credit_s: float = 60.0
    """Audio a client may leave untaken before the codec stops for it."""
    waiting: int = 64
    """Utterances that may wait for room; more are refused."""
    longest_wait_s: float = 5.0
    """An utterance that found no room for so long is refused."""
    max_text_chars: int = 20_000
    threads: int = 1
    """CPU threads of the engine process."""


def deterministic(config: EngineConfig, rows: int = 4) -> EngineConfig:
    """The same with one shape for every launch: `rows` rows, and codec chunks of one frame. An utterance's samples are then the
    same bits whoever is spoken beside it and however fast its text came, also where a batch of another size or a chunk of
    another length rounds differently. Costs more a frame; for tests and bug reports."""
    return replace(config, buckets=(rows,), first_frames=1, chunk_frames=(1,))


LATENCY = EngineConfig()
BALANCED = replace(LATENCY, first_frames=2, chunk_frames=(2, 4, 8), ahead_s=4.0)
THROUGHPUT = replace(LATENCY, first_frames=4, chunk_frames=(4, 8, 16), ahead_s=8.0)
PROFILES = {"latency": LATENCY, "balanced": BALANCED, "throughput": THROUGHPUT}

# On a GPU a launch takes milliseconds whatever its rows, so slots and buckets are many; the checkpoint's first frame is silence for most
# voices, so the first chunk has two.
GPU_LATENCY = replace(
    LATENCY,
    slots=512,
    positions=1024,
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    first_frames=2,
    chunk_frames=(1, 2, 4, 8, 12),
    prefill_rows=32,
    calm_s=0.3,
    safety_s=0.01,
    waiting=1024,
)
GPU_BALANCED = replace(GPU_LATENCY, chunk_frames=(2, 4, 8, 12), ahead_s=4.0)
GPU_THROUGHPUT = replace(GPU_LATENCY, slots=896, positions=768, first_frames=4, chunk_frames=(4, 8, 12), ahead_s=8.0, calm_s=math.inf)
GPU_PROFILES = {"latency": GPU_LATENCY, "balanced": GPU_BALANCED, "throughput": GPU_THROUGHPUT}


def profile(name: str, device_type: str) -> EngineConfig:
    """A profile's numbers for `cpu` or `cuda`."""
    return (PROFILES if device_type == "cpu" else GPU_PROFILES)[name]


def describe(config: EngineConfig) -> str:
    """What tells profiles apart, in words, for the log."""
    chunks = ", ".join(map(str, config.chunk_frames))
    return (
        f"{config.slots} slots of {config.positions} positions, launches up to {config.buckets[-1]} rows, first chunk {config.first_frames} frames, "
        f"then {chunks}; made up to {config.ahead_s:g} s ahead"
    )
