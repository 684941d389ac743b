"""Reads a checkpoint folder in the released format. Whatever is missing, extra, misshapen or truncated is one error that names it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.model.codec import CodecDecoder
from engine.model.config import ModelConfig, load_codec_encoder_config, load_config, load_speaker_encoder_config, read_json
from engine.model.encoder import CodecEncoder
from engine.model.layers import fuse
from engine.model.predictor import CodePredictor
from engine.model.speaker import SpeakerEncoder
from engine.model.talker import Talker
from engine.model.text import Tokenizer

TALKER = "talker."
PREDICTOR = "talker.code_predictor."
SPEAKER_ENCODER = "speaker_encoder."
CODEC_DECODER = "decoder."
CODEC_ENCODER = "encoder."


@dataclass(repr=False)
class Checkpoint:
    """Everything the engine computes with, on one device."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    talker: Talker
    predictor: CodePredictor
    codec: CodecDecoder


class TensorFiles:
    """The tensors of model.safetensors, or of the files an index names, by name."""

    def __init__(self, folder: Path) -> None:
        self.where = folder / "model.safetensors"
        index = folder / "model.safetensors.index.json"
        if not self.where.exists() and index.exists():
            self.where = index
            self.files = sorted({folder / str(name) for name in read_json(index).get("weight_map", {}).values()})
        else:
            self.files = [self.where]
        self.home: dict[str, Path] = {}
        for file in self.files:
            for name in _header(file):
                self.home[name] = file

    def load(self, modules: dict[str, nn.Module], ignored: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Fill each module's parameters from the tensors below its prefix; longest prefix wins, `ignored` prefixes may hold anything."""
        expected: dict[str, tuple[str, str]] = {}
        for prefix, module in modules.items():
            for name, _ in module.named_parameters():
                expected[prefix + name] = (prefix, name)
        missing = sorted(expected.keys() - self.home.keys())
        if missing:
            raise CheckpointError(f"{self.where}: tensor '{missing[0]}' is missing{_more(missing)}")
        extra = sorted(name for name in self.home.keys() - expected.keys() if not name.startswith(ignored))
        if extra:
            raise CheckpointError(f"{self.where}: unexpected tensor '{extra[0]}'{_more(extra)}; does config.json belong to this file?")
        states: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in modules}
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a dict
                        if name in expected:
                            prefix, parameter = expected[name]
                            wanted = tuple(modules[prefix].get_parameter(parameter).shape)
                            found = tuple(tensors.get_slice(name).get_shape())
                            if found != wanted:
                                raise CheckpointError(f"{file}: tensor '{name}' has shape {list(found)}, config.json asks for {list(wanted)}")
                            states[prefix][parameter] = tensors.get_tensor(name).to(device=device, dtype=dtype)
            except SafetensorError as error:
                raise CheckpointError(f"{file}: not a whole safetensors file ({error})") from None
        for prefix, module in modules.items():
            module.load_state_dict(states[prefix], assign=True)


def load_checkpoint(
    folder: Path, *, dtype: torch.dtype = torch.float32, codec_dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Checkpoint:
    """Load a released or fine-tuned Qwen3-TTS 12 Hz folder; `codec_dtype` is `dtype` if not given. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; --model takes a folder in the released Qwen3-TTS format")
    device = device or torch.device("cpu")
    config = load_config(folder)
    with torch.device("meta"):
        talker = Talker(config.talker)
        predictor = CodePredictor(config.predictor, config.talker.body.hidden)
        codec = CodecDecoder(config.codec)
    main = TensorFiles(folder)
    # A Base checkpoint carries its speaker encoder in the same file.
    ignored = (SPEAKER_ENCODER,) if config.type == "base" else ()
    main.load({TALKER: talker, PREDICTOR: predictor}, ignored, dtype, device)
    TensorFiles(folder / "speech_tokenizer").load({CODEC_DECODER: codec}, (CODEC_ENCODER,), codec_dtype or dtype, device)
    for module in (talker, predictor, codec):
        module.requires_grad_(False)
        module.eval()
        fuse(module)
    return Checkpoint(checkpoint_name(folder), config, Tokenizer(folder, config), talker, predictor, codec)


def checkpoint_name(folder: Path) -> str:
    """What to call a checkpoint: its folder's name, or the model's where the folder is a snapshot in the hub's cache."""
    folder = folder.resolve()
    return folder.parents[1].name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name


def load_encoders(folder: Path) -> tuple[SpeakerEncoder, CodecEncoder]:
    """The parts of a Base checkpoint that only making a clone voice needs. Raises CheckpointError."""
    with torch.device("meta"):
        speaker, codec = SpeakerEncoder(load_speaker_encoder_config(folder)), CodecEncoder(load_codec_encoder_config(folder))
    cpu = torch.device("cpu")
    TensorFiles(folder).load({SPEAKER_ENCODER: speaker}, (TALKER,), torch.float32, cpu)
    TensorFiles(folder / "speech_tokenizer").load({CODEC_ENCODER: codec}, (CODEC_DECODER,), torch.float32, cpu)
    for module in (speaker, codec):
        module.requires_grad_(False)
        module.eval()
        fuse(module)
    return speaker, codec


def _header(file: Path) -> dict[str, Any]:
    """Tensor names of a safetensors file, its length checked against its own header."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise CheckpointError(f"{file}: truncated or not a safetensors file (header of {length} bytes in a file of {size})")
            header: dict[str, Any] = json.loads(stream.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: file is missing") from None
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error})") from None
    header.pop("__metadata__", None)
    wanted = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if wanted != size:
        raise CheckpointError(f"{file}: truncated: {size} bytes, its header describes {wanted}")
    return header


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
