"""A checkpoint of random weights in a released one's exact shape: what an engine costs can be measured without the released weights."""

from __future__ import annotations

import time
from pathlib import Path

from engine.errors import CheckpointError
from engine.random_checkpoint.files import VARIANTS, codec_tensors, main_tensors, write_small_files
from engine.random_checkpoint.tokenizer import write_tokenizer
from engine.random_checkpoint.weights import Recipe, write_tensors

__all__ = ["VARIANTS", "make"]


def make(folder: Path, like: str, seed: int = 0) -> str:
    """Write such a checkpoint into `folder`, which must not exist or be empty; returns what was made, in words. The same seed gives the
    same weights. Raises CheckpointError."""
    begin_s = time.monotonic()
    if like not in VARIANTS:
        raise CheckpointError(f"--like {like}: there is no such checkpoint; choose one of {', '.join(VARIANTS)}")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise CheckpointError(f"{folder}: the folder is not empty; name a new one")
        write_small_files(folder, like)
        size = fill(folder, seed)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror or error}); a 1.7B checkpoint takes 4.6 GB") from None
    return f"{folder}: random weights like {like}, seed {seed}, {size / 1e9:.2f} GB in {time.monotonic() - begin_s:.1f} s"


def fill(folder: Path, seed: int) -> int:
    """Add tokenizer and weights to a folder that has its small files, in whatever shape these say; returns the bytes of weights."""
    write_tokenizer(folder)
    recipe = Recipe(folder, seed)
    return write_tensors(folder / "model.safetensors", main_tensors(folder), recipe) + write_tensors(
        folder / "speech_tokenizer" / "model.safetensors", codec_tensors(folder), recipe
    )
