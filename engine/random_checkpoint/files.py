"""The files of a released checkpoint beside its weights, and the weights' names and shapes.

`released/` holds the small files of 1.7B-CustomVoice as they were published (speech_tokenizer/config.json in the same values, and a
tokenizer_config.json with the published added tokens); the other variants differ from it in a few fields."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.model.checkpoint import CODEC_DECODER, CODEC_ENCODER, PREDICTOR, SPEAKER_ENCODER, TALKER
from engine.model.codec import CodecDecoder
from engine.model.config import load_codec_encoder_config, load_config, load_speaker_encoder_config
from engine.model.encoder import CodecEncoder
from engine.model.predictor import CodePredictor
from engine.model.speaker import SpeakerEncoder
from engine.model.talker import Talker

RELEASED = Path(__file__).parent / "released"
FRAMES_PER_CHAR = 0.9
"""Random weights never end by themselves; English text of so many characters is spoken in about as many frames."""


@dataclass(frozen=True)
class Variant:
    """Where a released checkpoint differs from 1.7B-CustomVoice."""

    kind: str
    size: str = "1b7"
    hidden: int = 2048
    intermediate: int = 6144


VARIANTS = {
    "1.7B-CustomVoice": Variant("custom_voice"),
    "1.7B-VoiceDesign": Variant("voice_design"),
    "1.7B-Base": Variant("base"),
    "0.6B-CustomVoice": Variant("custom_voice", "0b6", 1024, 3072),
    "0.6B-Base": Variant("base", "0b6", 1024, 3072),
}


@dataclass(frozen=True)
class TensorFile:
    """What a safetensors file holds: shapes by name, one dtype for all, and whether it says which library wrote it."""

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    metadata: bool


def config_json(like: str) -> dict[str, Any]:
    """config.json of a released checkpoint."""
    variant = VARIANTS[like]
    config: dict[str, Any] = json.loads((RELEASED / "config.json").read_text(encoding="utf-8"))
    config |= {"tts_model_size": variant.size, "tts_model_type": variant.kind}
    talker = config["talker_config"]
    talker |= {"hidden_size": variant.hidden, "intermediate_size": variant.intermediate}
    if variant.kind != "custom_voice":
        talker |= {"spk_id": {}, "spk_is_dialect": {}}
        talker["codec_language_id"] = {name: row for name, row in talker["codec_language_id"].items() if not name.endswith("_dialect")}
    if variant.kind == "base":
        config["speaker_encoder_config"] = {"enc_dim": variant.hidden, "sample_rate": 24000}
    return config


def write_small_files(folder: Path, like: str) -> None:
    """All of them; generation_config.json says how long such a voice speaks."""
    shutil.copytree(RELEASED, folder, dirs_exist_ok=True)
    _write_json(folder / "config.json", config_json(like))
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    _write_json(folder / "generation_config.json", generation | {"frames_per_char": FRAMES_PER_CHAR})


def main_tensors(folder: Path) -> TensorFile:
    """What model.safetensors holds, by the folder's config.json."""
    config = load_config(folder)
    with torch.device("meta"):
        parts: dict[str, nn.Module] = {
            TALKER: Talker(config.talker),
            PREDICTOR: CodePredictor(config.predictor, config.talker.body.hidden),
        }
        if config.type == "base":
            parts[SPEAKER_ENCODER] = SpeakerEncoder(load_speaker_encoder_config(folder))
    # The released Base files lack the metadata that the others have.
    return TensorFile(_shapes(parts), torch.bfloat16, metadata=config.type != "base")


def codec_tensors(folder: Path) -> TensorFile:
    """What speech_tokenizer/model.safetensors holds; its encoder is there in every variant."""
    config = load_config(folder)
    with torch.device("meta"):
        parts = {CODEC_DECODER: CodecDecoder(config.codec), CODEC_ENCODER: CodecEncoder(load_codec_encoder_config(folder))}
    return TensorFile(_shapes(parts), torch.float32, metadata=False)


def _shapes(parts: dict[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    def named() -> Iterator[tuple[str, tuple[int, ...]]]:
        for prefix, module in parts.items():
            for name, parameter in module.named_parameters():
                yield prefix + name, tuple(parameter.shape)

    return dict(sorted(named()))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
