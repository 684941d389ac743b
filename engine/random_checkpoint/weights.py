"""Random weights of such sizes that activations stay sane through every layer, written to disk as they are made.

A layer keeps the variance of what it is given, a residual branch adds its share of one more; drawn codes then spread over the codebook,
and the sound is noise of about -20 dBFS. Two things are as a real voice has them, by weights alone:
- The first frame is silent: the codec's first convolution does not look at the newest frame, and there are no biases.
- End of speech is all but never drawn, though its logit takes part in every draw: it is 0, where 2,047 others are of deviation 2."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.model.config import load_config
from engine.random_checkpoint.files import TensorFile

PIECE = 1 << 24
"""Elements made at once by a thread: 32 MB in bfloat16."""
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True)
class Normal:
    std: float
    mean: float = 0.0


class Recipe:
    """What each tensor of a checkpoint is filled with. Drawn numbers depend on the seed, the tensor's name and the place in it alone."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.config = load_config(folder)
        self.seed = seed

    def piece(self, name: str, shape: tuple[int, ...], begin: int, dtype: torch.dtype) -> Tensor:
        """Elements `begin` to `begin + PIECE` of a tensor, flat."""
        count = min(PIECE, math.prod(shape) - begin)
        normal = self.normal(name, shape)
        values = torch.empty(count, dtype=dtype)
        if normal.std == 0.0:
            values.fill_(normal.mean)
        else:
            # The generator looks at 32 bits of its seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name} {begin}".encode()))
            values.normal_(normal.mean, normal.std, generator=generator)
        if name == "talker.codec_head.weight":
            width = shape[1]
            silent = self.config.talker.eos * width - begin
            values[max(0, silent) : max(0, silent + width)] = 0.0
        elif name == "decoder.pre_conv.conv.weight":
            # Kernels lie last: every third element is the newest frame's.
            values[(shape[-1] - 1 - begin) % shape[-1] :: shape[-1]] = 0.0
        return values

    def normal(self, name: str, shape: tuple[int, ...]) -> Normal:
        """The distribution of one tensor's elements."""
        if name.endswith(("bias", "alpha")):
            return Normal(0.0)
        if name.endswith(("cluster_usage", "initialized")):
            return Normal(0.0, 1.0)
        if name.endswith("beta"):  # Snake's depth is exp(-beta): shallow enough that its mean does not take over
            return Normal(0.0, 1.0)
        if name.endswith(("layer_scale.scale", "gamma")):
            return Normal(0.01, 0.1)
        if name.endswith("norm.weight"):
            return Normal(0.05, 1.0)
        if "text_embedding" in name:
            return Normal(1.0)
        if "codec_embedding" in name or name.endswith(("embedding_sum", "embed_sum")):
            return Normal(0.25)  # of 16 added up each has its share
        if name.endswith("decoder.6.conv.weight"):
            return Normal(self._share(shape) * OUTPUT_GAIN)
        if "head." in name:
            return Normal(2.0 * self._share(shape))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return Normal(self._share(shape) / math.sqrt(2 * self._layers(name)))
        if ".upsample." in name and ".0.conv" in name:
            return Normal(1.0 / math.sqrt(shape[0]))  # transposed, kernel = stride: [in, out, kernel]
        if ".block.1." in name and len(shape) == 3 and shape[0] != shape[1]:
            return Normal(1.0 / math.sqrt(2 * shape[0]))  # transposed, kernel = twice the stride
        if ".conv2.conv." in name and name.startswith("decoder."):
            return Normal(self._share(shape) / math.sqrt(3))  # the last of a residual unit; a block has three
        return Normal(self._share(shape))

    def _share(self, shape: tuple[int, ...]) -> float:
        """Deviation that keeps the variance: one by the root of the inputs."""
        return 1.0 / math.sqrt(max(1, math.prod(shape[1:])))

    def _layers(self, name: str) -> int:
        if name.startswith("talker.code_predictor."):
            return self.config.predictor.body.layers
        return self.config.talker.body.layers if name.startswith("talker.") else self.config.codec.body.layers


OUTPUT_GAIN = 0.02
"""Of the codec's last convolution, after which noise of deviation 5.5 becomes sound of 0.11."""


def write_tensors(path: Path, file: TensorFile, recipe: Recipe) -> int:
    """Write a safetensors file, as many pieces at once as there are cores; returns its bytes."""
    begin, size = layout(file)
    width = file.dtype.itemsize
    with path.open("wb") as stream:
        stream.write(begin)
        stream.truncate(size)
        number = stream.fileno()

        def write(piece: tuple[str, tuple[int, ...], int, int]) -> None:
            name, shape, first, at = piece
            values = recipe.piece(name, shape, first, file.dtype)
            data = values.view(torch.uint8).numpy().data
            while data:
                done = os.pwrite(number, data, at)
                data, at = data[done:], at + done

        def pieces() -> Iterator[tuple[str, tuple[int, ...], int, int]]:
            at = len(begin)
            for name, shape in file.shapes.items():
                for first in range(0, math.prod(shape), PIECE):
                    yield name, shape, first, at + first * width
                at += math.prod(shape) * width

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # Listed, so that an error of a thread is raised here.
            list(pool.map(write, pieces()))
    return size


def layout(file: TensorFile) -> tuple[bytes, int]:
    """The head of a safetensors file, as the library writes it, and the whole file's bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if file.metadata else {}
    at = 0
    for name, shape in file.shapes.items():
        end = at + math.prod(shape) * file.dtype.itemsize
        header[name] = {"dtype": DTYPES[file.dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at
