"""Checkpoints in pieces small enough to carry, and a log line with the time."""

import gzip
import io
import time
from pathlib import Path

import torch

PIECE = 15 << 20  # bytes


def save(state: object, path: Path) -> None:
    """path.part0, path.part1, ...; each appears whole or not at all."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    for k in range(-(-len(data) // PIECE)):
        piece = path.with_name(f"{path.name}.part{k}")
        temporary = piece.with_suffix(".tmp")
        temporary.write_bytes(data[k * PIECE : (k + 1) * PIECE])
        temporary.rename(piece)


def load(path: Path) -> dict:
    pieces = sorted(path.parent.glob(path.name + ".part*"))
    return torch.load(io.BytesIO(b"".join(p.read_bytes() for p in pieces)), map_location="cpu")


def exists(path: Path) -> bool:
    return path.with_name(path.name + ".part0").exists()


def half(state: dict) -> dict:
    return {k: v.detach().half().cpu() if v.is_floating_point() else v.cpu() for k, v in state.items()}


def full(state: dict) -> dict:
    return {k: v.float() if v.is_floating_point() else v for k, v in state.items()}


class Clock:
    """Seconds since the start of the run; several programs of one run share the start."""

    def __init__(self, start: float | None) -> None:
        self.start = start or time.time()

    def __call__(self) -> float:
        return time.time() - self.start

    def log(self, *words: object) -> None:
        print(f"{self():.0f}s", *words, flush=True)


def end_at(out: Path, default: float) -> float:
    """The time to end at: OUT/end-at when somebody has written it."""
    file = out / "end-at"
    return float(file.read_text()) if file.exists() else default


def read_rows(text: Path) -> list[str]:
    """The sentences of a train.txt.gz."""
    with gzip.open(text, "rt", encoding="utf-8") as f:
        return f.read().split("\n")
