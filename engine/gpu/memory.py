"""How much memory an engine takes on a GPU, told before any of it is taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.model.config import load_config

GIB = 2**30
# Graphs, activations of the largest launches, libraries and what the allocator cannot use: 4.5 GiB in the released shape.
BESIDE = 5 * GIB
# Weights are loaded once and packed once, part by part: their share above what is stored.
PACKED = 1.5


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    weights: int
    slot: int
    slots: int

    @property
    def total(self) -> int:
        return self.weights + self.slot * self.slots + BESIDE

    @staticmethod
    def of(folder: Path, config: EngineConfig) -> Memory:
        """For the checkpoint in `folder` in 16 bits. Raises CheckpointError."""
        shape = load_config(folder)
        stored = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        table = 2 * shape.talker.text_vocab * shape.talker.body.hidden
        body, window = shape.talker.body, shape.codec.body
        talker = 2 * body.layers * body.kv_heads * config.positions * body.head_dim
        codec = 2 * window.layers * window.kv_heads * (shape.codec.window + config.chunk_frames[-1]) * window.head_dim
        return Memory(round(stored * PACKED) + table, 2 * (talker + codec), config.slots + 1)

    def shortage(self, free: int) -> str:
        """What to tell whoever has too little."""
        fits = (free - self.weights - BESIDE) // self.slot if free > self.weights + BESIDE else 0
        what = (
            f"device: {self.weights / GIB:.1f} GiB of weights, {self.slots * self.slot / GIB:.1f} for {self.slots - 1} utterances and "
            f"{BESIDE / GIB:.0f} beside are more than the {free / GIB:.1f} GiB that are free on the GPU"
        )
        remedy = f"take --slots {max(1, fits - 1)} or fewer" if fits > 1 else "take a smaller model, or a GPU with more memory"
        return f"{what}; {remedy}, or serve on the CPU with --device cpu"
