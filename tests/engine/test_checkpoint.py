"""Loading: what is wrong with a folder is one error that names it; sizes come from the config alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.checkpoint import load_checkpoint
from engine.model.codec import CodecState
from tests.conftest import FIXTURES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "checkpoints" / "cv17", tmp_path / "cv17"))


def change_config(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json") -> None:
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], name: str = "model.safetensors") -> None:
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    return str(caught.value)


def test_missing_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop("talker.model.layers.1.mlp.up_proj.weight"))
    assert "tensor 'talker.model.layers.1.mlp.up_proj.weight' is missing" in error_of(folder)


def test_missing_codec_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop("decoder.pre_conv.conv.bias"), "speech_tokenizer/model.safetensors")
    assert "tensor 'decoder.pre_conv.conv.bias' is missing" in error_of(folder)


def test_extra_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"talker.model.layers.9.mlp.up_proj.weight": torch.zeros(2)}))
    assert "unexpected tensor 'talker.model.layers.9.mlp.up_proj.weight'" in error_of(folder)


def test_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"talker.codec_head.weight": torch.zeros(3, 5)}))
    message = error_of(folder)
    assert "talker.codec_head.weight" in message and "[3, 5]" in message and "[1088, 64]" in message


@pytest.mark.parametrize("name", ["model.safetensors", "speech_tokenizer/model.safetensors"])
@pytest.mark.parametrize("keep", [0, 7, 5000, -1])
def test_truncated_file_is_named(folder: Path, name: str, keep: int) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:keep])
    message = error_of(folder)
    assert name in message and ("truncated" in message or "not a safetensors file" in message)


def test_wrong_model_type(folder: Path) -> None:
    change_config(folder, lambda c: c.update(model_type="qwen3"))
    assert "model_type is 'qwen3', expected 'qwen3_tts'" in error_of(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "vocab.json", "merges.txt", "model.safetensors", "speech_tokenizer/config.json", "speech_tokenizer/model.safetensors"]
)
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert Path(name).name in error_of(folder)


def test_missing_field_is_named(folder: Path) -> None:
    change_config(folder, lambda c: c["talker_config"].pop("hidden_size"))
    assert "'hidden_size' is missing" in error_of(folder)


def test_config_of_another_size_is_refused(folder: Path) -> None:
    change_config(folder, lambda c: c["talker_config"].update(num_hidden_layers=2))
    assert "unexpected tensor 'talker.model.layers.2." in error_of(folder)


def test_no_folder(tmp_path: Path) -> None:
    assert "no such folder" in error_of(tmp_path / "nowhere")


def test_codec_without_encoder_and_index_file_load(folder: Path) -> None:
    change_tensors(folder, lambda t: [t.pop(n) for n in list(t) if n.startswith("encoder.")], "speech_tokenizer/model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = load_file(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    load_checkpoint(folder)


def test_fewer_groups_and_another_codebook_size(folder: Path) -> None:
    """A checkpoint of 5 groups of 32 codes, cut from the one of 16 times 64."""
    groups, codes = 5, 32

    def talker(t: dict[str, torch.Tensor]) -> None:
        for name in list(t):
            part = name.split(".")
            if "code_predictor.lm_head" in name or "code_predictor.model.codec_embedding" in name:
                if int(part[-2]) >= groups - 1:
                    del t[name]
                else:
                    t[name] = t[name][:codes].contiguous()

    def codec(t: dict[str, torch.Tensor]) -> None:
        for name in list(t):
            if name.startswith("encoder.") or ("rvq_rest.vq.layers" in name and int(name.split(".layers.")[1].split(".")[0]) >= groups - 1):
                del t[name]
            elif "_codebook" in name:
                t[name] = t[name][:codes].contiguous()

    change_tensors(folder, talker)
    change_tensors(folder, codec, "speech_tokenizer/model.safetensors")
    change_config(folder, lambda c: c["talker_config"].update(num_code_groups=groups))
    change_config(folder, lambda c: c["talker_config"]["code_predictor_config"].update(num_code_groups=groups, vocab_size=codes))
    change_config(folder, lambda c: c["decoder_config"].update(num_quantizers=groups, codebook_size=codes), "speech_tokenizer/config.json")
    checkpoint = load_checkpoint(folder)
    state = CodecState([torch.zeros(1, *shape) for shape in checkpoint.codec.state_shapes], torch.zeros(1, dtype=torch.int64))
    samples = checkpoint.codec(torch.randint(0, codes, (1, 3, groups)), state)
    assert samples.shape == (1, 3 * 1920) and bool(samples.isfinite().all())


def test_group_count_that_disagrees_is_named(folder: Path) -> None:
    change_config(folder, lambda c: c["decoder_config"].update(num_quantizers=8), "speech_tokenizer/config.json")
    assert "num_quantizers is 8, but talker_config has 16" in error_of(folder)
