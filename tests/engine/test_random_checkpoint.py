"""Random checkpoints: the released files' shapes to the byte, and a miniature of them that speaks through the whole engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from engine.config import LATENCY
from engine.errors import CheckpointError
from engine.loop import EngineLoop
from engine.messages import Append, AudioChunk, Done, Event, Finish, Open, Sampling, SpeechRequest
from engine.model.checkpoint import Checkpoint, load_checkpoint, load_encoders
from engine.random_checkpoint import VARIANTS, fill, make
from engine.random_checkpoint.files import codec_tensors, main_tensors, write_small_files
from engine.random_checkpoint.weights import PIECE, Recipe, layout, write_tensors
from engine.stages import Stages

# Bytes of model.safetensors, tensors and parameters as published; every name and shape counts in the first.
PUBLISHED = {
    "1.7B-CustomVoice": (3_833_402_552, 404, 1_916_676_352),
    "1.7B-VoiceDesign": (3_833_402_552, 404, 1_916_676_352),
    "1.7B-Base": (3_857_413_744, 480, 1_928_677_440),
    "0.6B-CustomVoice": (1_811_626_576, 402, 905_788_672),
    "0.6B-Base": (1_829_344_272, 478, 914_643_008),
}
PUBLISHED_CODEC = (682_293_092, 496)
FILES = {
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "model.safetensors",
}
CODEC_FILES = {"config.json", "configuration.json", "preprocessor_config.json", "model.safetensors"}
TEXT = "The quick brown fox jumps over the lazy dog, twice."


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def narrow(folder: Path) -> None:
    """The same in thin layers, few of them: what remains are the vocabularies, the ids and the 1,920 samples a frame."""

    def main(config: dict[str, Any]) -> None:
        talker = config["talker_config"]
        body = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 96}
        talker |= body | {"hidden_size": 64, "text_hidden_size": 32}
        talker["code_predictor_config"] |= body | {"hidden_size": 48, "num_hidden_layers": 2}

    def codec(config: dict[str, Any]) -> None:
        small = {"latent_dim": 64, "codebook_dim": 32, "decoder_dim": 128, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
        config["decoder_config"] |= small | {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
        tiny = {"hidden_size": 32, "num_filters": 2, "codebook_dim": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_quantizers": 16}
        config["encoder_config"] |= tiny | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}

    edit(folder / "config.json", main)
    edit(folder / "speech_tokenizer" / "config.json", codec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "mini"
    write_small_files(folder, "1.7B-CustomVoice")
    narrow(folder)
    fill(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def mini(folder: Path) -> Checkpoint:
    return load_checkpoint(folder)


def rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


@pytest.mark.parametrize("like", VARIANTS)
def test_the_shapes_are_the_published_ones_to_the_byte(like: str, tmp_path: Path) -> None:
    write_small_files(tmp_path, like)
    main, codec = main_tensors(tmp_path), codec_tensors(tmp_path)
    parameters = sum(math.prod(shape) for shape in main.shapes.values())
    assert (layout(main)[1], len(main.shapes), parameters) == PUBLISHED[like]
    assert (layout(codec)[1], len(codec.shapes)) == PUBLISHED_CODEC
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tts_model_size"] == {"1": "1b7", "0": "0b6"}[like[0]]
    assert len(config["talker_config"]["spk_id"]) == (9 if like.endswith("CustomVoice") else 0)
    assert len(config["talker_config"]["codec_language_id"]) == (12 if like.endswith("CustomVoice") else 10)


def test_the_files_are_the_released_ones_and_the_library_reads_them(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES | {"speech_tokenizer"}
    assert {path.name for path in (folder / "speech_tokenizer").iterdir()} == CODEC_FILES
    for file, dtype in ((folder, torch.bfloat16), (folder / "speech_tokenizer", torch.float32)):
        with safe_open(file / "model.safetensors", framework="pt") as tensors:
            assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {dtype}  # noqa: SIM118 - not a dict
    vocab = json.loads((folder / "vocab.json").read_text())
    assert sorted(vocab.values()) == list(range(151_643)) and vocab["assistant"] == 77_091 and vocab["Ċ"] == 198


def test_a_base_checkpoint_has_its_encoders(tmp_path: Path) -> None:
    write_small_files(tmp_path, "0.6B-Base")
    narrow(tmp_path)
    edit(tmp_path / "config.json", lambda config: config["speaker_encoder_config"].update(enc_dim=64))
    fill(tmp_path, seed=1)
    speaker, codec = load_encoders(tmp_path)
    with torch.inference_mode():
        assert speaker(torch.randn(128, 40)).shape == (64,)
        assert codec(torch.randn(5 * 1920) * 0.1).shape == (5, 16)


def test_the_seed_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    file = main_tensors(folder)
    names = list(file.shapes)[:40]
    file = replace(file, shapes={name: file.shapes[name] for name in names})
    for seed in (1, 2):
        write_tensors(tmp_path / str(seed), file, Recipe(folder, seed))
    with safe_open(folder / "model.safetensors", "pt") as all_, safe_open(tmp_path / "1", "pt") as same, safe_open(tmp_path / "2", "pt") as other:
        assert all(torch.equal(same.get_tensor(name), all_.get_tensor(name)) for name in names)
        assert not torch.equal(other.get_tensor(names[0]), all_.get_tensor(names[0]))


def test_text_is_cut_into_about_as_many_tokens_as_released_ones_make(mini: Checkpoint) -> None:
    head, ids = mini.tokenizer.target(TEXT)
    assert head == [151_644, 77_091, 198]
    assert 2.5 <= len(TEXT) / len(ids) <= 6.0 and mini.tokenizer.decode(ids) == TEXT
    odd = "naïve 東京 🙂"
    assert mini.tokenizer.decode(mini.tokenizer.encode(odd)) == odd


class Said:
    """One text, spoken to its end by the loop."""

    def __init__(self, checkpoint: Checkpoint, text: str = TEXT, *, live: bool = False, trim: bool = False, **fields: Any) -> None:
        config = replace(LATENCY, slots=2, positions=256, buckets=(1,), trim_onset=trim)
        events: list[Event] = []
        now_s = 0.0
        self.stages = Stages(checkpoint, config)
        self.codes: list[list[int]] = []
        self.hidden: list[float] = []
        self.stages.predictor_stage.tap = lambda what, slots, values: self.codes.append(values[0].tolist()) if what == "codes" else None
        checkpoint.talker.watch = lambda x: self.hidden.append(rms(x))
        loop = EngineLoop(self.stages, config, lambda client, event: events.append(event), lambda: now_s)
        loop.handle(b"", Open(loop.epoch, 1, SpeechRequest(live=live, pace="file", sampling=Sampling(seed=3), **fields)), now_s)
        loop.handle(b"", Append(loop.epoch, 1, text), now_s)
        loop.handle(b"", Finish(loop.epoch, 1), now_s)
        while not loop.idle:
            now_s += 0.001 + (loop.turn(now_s) or 0.0)
        checkpoint.talker.watch = None
        self.pcm = np.frombuffer(b"".join(event.pcm for event in events if isinstance(event, AudioChunk)), np.int16)
        self.done = next(event for event in events if isinstance(event, Done))


@pytest.mark.parametrize("live", [False, True])
def test_it_speaks_for_as_many_frames_as_its_text_has_characters_times_the_share(mini: Checkpoint, live: bool) -> None:
    said = Said(mini, live=live)
    assert len(said.pcm) == round(0.9 * len(TEXT)) * 1920
    assert (said.done.reason, said.done.text_until) == ("end", len(TEXT))


def test_a_caller_may_end_it_earlier(mini: Checkpoint) -> None:
    said = Said(mini, max_frames=5)
    assert len(said.pcm) == 5 * 1920 and said.done.reason == "length"


def test_activations_sound_and_codes_are_sane(mini: Checkpoint) -> None:
    said = Said(mini)
    # The prompt's and every step's, at each layer and behind the last norm.
    assert len(said.hidden) > 5 * round(0.9 * len(TEXT)) and min(said.hidden) > 0.3 and max(said.hidden) < 4.0
    sound = said.pcm / 32767.0
    first, rest = sound[:1920], sound[1920:]
    assert not first.any()
    frames = np.sqrt(np.square(rest.reshape(-1, 1920) - rest.reshape(-1, 1920).mean(1, keepdims=True)).mean(1))
    assert frames.min() > 0.02 and frames.max() < 0.25
    assert np.abs(sound).max() < 0.999, "it clips"
    codes = np.array(said.codes)
    assert codes.shape[1] == 16 and codes.max() < 2048
    for group in range(16):
        # Drawn all over the codebook, and not the same few again and again.
        assert len(set(codes[:, group])) > 0.7 * len(codes) and np.ptp(codes[:, group]) > 1200


def test_only_the_silence_of_the_first_frame_is_trimmed(mini: Checkpoint) -> None:
    assert len(Said(mini, trim=True).pcm) == round(0.9 * len(TEXT)) * 1920 - (1920 - 720)


def test_end_of_speech_is_possible_but_not_likely(mini: Checkpoint) -> None:
    logits = mini.talker.codec_head(torch.randn(64, 64))
    eos = mini.config.talker.eos
    assert not logits[:, eos].any()
    assert float(logits[:, :2048].topk(50).values[:, -1].min()) > 1.0


def test_the_full_shape_is_as_sane_as_the_miniature(tmp_path: Path) -> None:
    """What the recipe gives one released-width layer and the codec's widest convolutions, without the other layers' gigabytes."""
    write_small_files(tmp_path, "1.7B-CustomVoice")
    recipe, shapes = Recipe(tmp_path, 1), main_tensors(tmp_path).shapes | codec_tensors(tmp_path).shapes

    def weight(name: str) -> Tensor:
        shape = shapes[name]
        pieces = [recipe.piece(name, shape, begin, torch.float32) for begin in range(0, math.prod(shape), PIECE)]
        return torch.cat(pieces).view(shape)

    x = torch.randn(8, 2048)
    layer = "talker.model.layers.3."
    assert 0.9 < rms(x @ weight(layer + "self_attn.q_proj.weight").T) < 1.1
    inside = torch.nn.functional.silu(x @ weight(layer + "mlp.gate_proj.weight").T) * (x @ weight(layer + "mlp.up_proj.weight").T)
    assert 0.05 < rms(inside @ weight(layer + "mlp.down_proj.weight").T) < 0.2  # one of 56 shares
    assert 1.8 < rms(x @ weight("talker.codec_head.weight").T) < 2.2
    up = torch.nn.functional.conv_transpose1d(torch.randn(1, 1536, 6), weight("decoder.decoder.1.block.1.conv.weight"), stride=8)
    assert 0.85 < rms(up[..., 8:-8]) < 1.15


@pytest.mark.parametrize("value", [0, -1, "much", True])
def test_a_share_that_makes_no_sense_is_named(folder: Path, tmp_path: Path, value: object) -> None:
    for path in folder.rglob("*.json"):
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        target.write_text(path.read_text())
    edit(tmp_path / "generation_config.json", lambda content: content.update(frames_per_char=value))
    with pytest.raises(CheckpointError, match=r"generation_config.json: field 'frames_per_char'"):
        load_checkpoint(tmp_path)


def test_what_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--like 3B: .*1\.7B-CustomVoice"):
        make(tmp_path / "new", "3B")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not empty; name a new one"):
        make(tmp_path, "0.6B-Base")
    with pytest.raises(CheckpointError, match=r"file: cannot be written"):
        make(tmp_path / "file", "0.6B-Base")


def test_the_command_says_what_it_cannot_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine", "random-checkpoint", "--like", "3B", str(tmp_path / "x")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("error: --like 3B")
