"""Writes the checkpoint folder in the released format, and reads one back into the training-side classes.

    python -m engine.voice.train.export RUN TOKENIZER_FOLDER OUT [--temperature T ...]

RUN holds talker.part* and codec.part*. fp16 safetensors; the codec folder has the decoder half only. With --unpack it goes the other
way: OUT is read and RUN written, so that training can go on from a checkpoint (with the encoder's parts beside them).
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import parts
from .codec_model import Codec
from .sizes import (
    ASSISTANT,
    BOS,
    CODEC,
    ENGLISH,
    EOS,
    IM_END,
    IM_START,
    NOTHINK,
    PAD,
    SPEAKER,
    TALKER,
    THINK,
    THINK_BOS,
    THINK_EOS,
    TTS_BOS,
    TTS_EOS,
    TTS_PAD,
    VOICE,
    CodecSizes,
    TalkerSizes,
)
from .talker_model import EPS, THETA, Sampling, Talker


def configuration() -> dict:
    t = TALKER
    common = dict(
        attention_bias=False,
        attention_dropout=0,
        hidden_act="silu",
        rms_norm_eps=EPS,
        rope_theta=THETA,
        initializer_range=0.02,
        use_cache=True,
        use_sliding_window=False,
        sliding_window=None,
    )
    predictor = dict(
        common,
        model_type="qwen3_tts_talker_code_predictor",
        vocab_size=t.codebook,
        hidden_size=t.predictor_hidden,
        intermediate_size=t.predictor_inter,
        num_hidden_layers=t.predictor_layers,
        num_attention_heads=t.predictor_heads,
        num_key_value_heads=t.predictor_kv_heads,
        head_dim=t.head_dim,
        num_code_groups=t.groups,
        max_position_embeddings=4096,
    )
    talker = dict(
        common,
        model_type="qwen3_tts_talker",
        vocab_size=t.vocab,
        hidden_size=t.hidden,
        intermediate_size=t.inter,
        num_hidden_layers=t.layers,
        num_attention_heads=t.heads,
        num_key_value_heads=t.kv_heads,
        head_dim=t.head_dim,
        num_code_groups=t.groups,
        text_hidden_size=t.text_hidden,
        text_vocab_size=t.text_vocab,
        max_position_embeddings=4096,
        position_id_per_seconds=13,
        rope_scaling=dict(interleaved=True, mrope_section=[16, 8, 8], rope_type="default", type="default"),
        codec_eos_token_id=EOS,
        codec_think_id=THINK,
        codec_nothink_id=NOTHINK,
        codec_think_bos_id=THINK_BOS,
        codec_think_eos_id=THINK_EOS,
        codec_pad_id=PAD,
        codec_bos_id=BOS,
        codec_language_id={"english": ENGLISH},
        spk_id={VOICE: SPEAKER},
        spk_is_dialect={VOICE: False},
        code_predictor_config=predictor,
    )
    return dict(
        architectures=["Qwen3TTSForConditionalGeneration"],
        model_type="qwen3_tts",
        tokenizer_type="qwen3_tts_tokenizer_12hz",
        tts_model_size="0b6",
        tts_model_type="custom_voice",
        assistant_token_id=ASSISTANT,
        im_start_token_id=IM_START,
        im_end_token_id=IM_END,
        tts_pad_token_id=TTS_PAD,
        tts_bos_token_id=TTS_BOS,
        tts_eos_token_id=TTS_EOS,
        talker_config=talker,
    )


def codec_configuration() -> dict:
    c = CODEC
    decoder = dict(
        attention_bias=False,
        attention_dropout=0.0,
        latent_dim=c.latent,
        codebook_dim=c.codebook_dim,
        codebook_size=c.codebook,
        decoder_dim=c.decoder_dim,
        hidden_act="silu",
        hidden_size=c.latent,
        intermediate_size=c.inter,
        layer_scale_initial_scale=0.01,
        max_position_embeddings=8000,
        head_dim=c.latent // c.heads,
        num_attention_heads=c.heads,
        num_hidden_layers=c.layers,
        num_key_value_heads=c.heads,
        num_quantizers=c.groups,
        num_semantic_quantizers=1,
        rms_norm_eps=1e-5,
        rope_theta=10000,
        semantic_codebook_size=c.codebook,
        sliding_window=c.window,
        upsample_rates=[8, 5, 4, 3],
        upsampling_ratios=[2, 2],
        vector_quantization_hidden_dimension=c.vq_dim,
    )
    return dict(
        architectures=["Qwen3TTSTokenizerV2Model"],
        model_type="qwen3_tts_tokenizer_12hz",
        encoder_valid_num_quantizers=c.groups,
        input_sample_rate=24000,
        output_sample_rate=24000,
        decode_upsample_rate=1920,
        encode_downsample_rate=1920,
        decoder_config=decoder,
    )


def decoder_state(codec: dict[str, Tensor]) -> dict[str, Tensor]:
    """Training names -> released names. input_proj belongs to encoding and is not used here; it must exist."""
    out: dict[str, Tensor] = {}
    for name, value in codec.items():
        if name.startswith("books."):
            n, kind = int(name.split(".")[1]), name.split(".")[2]
            if kind == "embedding":
                book = "decoder.quantizer.rvq_first.vq.layers.0._codebook." if n == 0 else f"decoder.quantizer.rvq_rest.vq.layers.{n - 1}._codebook."
                out[book + "embedding_sum"], out[book + "cluster_usage"] = value, torch.ones(len(value), dtype=value.dtype)
        elif name.startswith("out_"):
            which = name[4:].split(".")[0]
            out[f"decoder.quantizer.rvq_{which}.output_proj.weight"] = value
            out[f"decoder.quantizer.rvq_{which}.input_proj.weight"] = value.transpose(0, 1)
        elif name.startswith("decoder."):
            out["decoder." + name[len("decoder.") :]] = value
    return {k: v.half().contiguous() for k, v in out.items()}


def write(talker: dict[str, Tensor], codec: dict[str, Tensor], tokenizer: Path, out: Path, sampling: Sampling) -> None:
    (out / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    save_file(
        {"talker." + k: v.half().contiguous() for k, v in talker.items() if not k.startswith("phone_head")},
        out / "model.safetensors",
        {"format": "pt"},
    )
    save_file(decoder_state(codec), out / "speech_tokenizer/model.safetensors", {"format": "pt"})
    generation = dict(
        do_sample=True,
        repetition_penalty=1.0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        subtalker_dosample=True,
        subtalker_temperature=sampling.predictor_temperature,
        subtalker_top_p=sampling.predictor_top_p,
        subtalker_top_k=sampling.predictor_top_k,
        # Frames for which the engine plans an utterance's text at its slowest (engine/extent.py): 360 characters or so, as long as any that
        # was trained. In longer ones the voice loses its way: of 700 characters in one piece 22 % of the words, in two 1 %.
        max_new_tokens=834,
    )
    for name, value in (
        ("config.json", configuration()),
        ("generation_config.json", generation),
        ("speech_tokenizer/config.json", codec_configuration()),
        ("preprocessor_config.json", dict(padding_side="left", padding_value=0.0, processor_class="Qwen3TTSProcessor", return_attention_mask=True)),
        (
            "speech_tokenizer/preprocessor_config.json",
            dict(
                chunk_length_s=None,
                feature_extractor_type="EncodecFeatureExtractor",
                feature_size=1,
                overlap=None,
                padding_side="right",
                padding_value=0.0,
                return_attention_mask=True,
                sampling_rate=24000,
            ),
        ),
    ):
        (out / name).write_text(json.dumps(value, indent=1) + "\n")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        if (tokenizer / name).resolve() != (out / name).resolve():
            shutil.copy(tokenizer / name, out / name)
    for f in ("model.safetensors", "speech_tokenizer/model.safetensors"):
        (out / f).chmod(0o644)
    sizes = {f: (out / f).stat().st_size for f in ("model.safetensors", "speech_tokenizer/model.safetensors")}
    print({f: f"{n / 1e6:.2f} MB" for f, n in sizes.items()}, f"folder {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 1e6:.2f} MB")


def read(folder: Path) -> tuple[Talker, Codec, Sampling]:
    """A folder written by `write`, in float32; sizes come from its configuration files."""
    config, codec_config = (json.loads((folder / f).read_text()) for f in ("config.json", "speech_tokenizer/config.json"))
    t, p, c = config["talker_config"], config["talker_config"]["code_predictor_config"], codec_config["decoder_config"]
    sizes = TalkerSizes(
        codebook=p["vocab_size"],
        groups=t["num_code_groups"],
        vocab=t["vocab_size"],
        hidden=t["hidden_size"],
        heads=t["num_attention_heads"],
        kv_heads=t["num_key_value_heads"],
        head_dim=t["head_dim"],
        inter=t["intermediate_size"],
        layers=t["num_hidden_layers"],
        text_vocab=t["text_vocab_size"],
        text_hidden=t["text_hidden_size"],
        predictor_hidden=p["hidden_size"],
        predictor_heads=p["num_attention_heads"],
        predictor_kv_heads=p["num_key_value_heads"],
        predictor_inter=p["intermediate_size"],
        predictor_layers=p["num_hidden_layers"],
    )
    talker = Talker(sizes).eval()
    talker.load_state_dict({k.removeprefix("talker."): v.float() for k, v in load_file(folder / "model.safetensors").items()})
    codec = Codec(
        CodecSizes(
            codebook=c["codebook_size"],
            groups=c["num_quantizers"],
            codebook_dim=c["codebook_dim"],
            latent=c["latent_dim"],
            heads=c["num_attention_heads"],
            inter=c["intermediate_size"],
            layers=c["num_hidden_layers"],
            window=c["sliding_window"],
            decoder_dim=c["decoder_dim"],
        ),
        encoder=False,
    ).eval()
    released = load_file(folder / "speech_tokenizer/model.safetensors")
    state = {}
    for k, v in released.items():
        k = k.removeprefix("decoder.")
        if k.startswith("quantizer."):
            first = "rvq_first" in k
            if k.endswith("embedding_sum"):
                usage = released["decoder." + k.replace("embedding_sum", "cluster_usage")]
                state[f"books.{0 if first else int(k.split('layers.')[1].split('.')[0]) + 1}.embedding"] = (
                    v.float() / usage.float().clamp(min=1e-5)[:, None]
                )
            elif "output_proj" in k:
                state[f"out_{'first' if first else 'rest'}.weight"] = v.float()
        else:
            state["decoder." + k] = v.float()
    missing = [
        k
        for k in codec.load_state_dict(state, strict=False).missing_keys
        if not k.startswith(("mel_head", "phone_head")) and not k.endswith((".usage", ".total"))
    ]
    if missing:
        raise ValueError(f"not in the checkpoint: {missing}")
    g = json.loads((folder / "generation_config.json").read_text())
    return talker, codec, Sampling(g["temperature"], g["top_k"], g["top_p"], g["subtalker_temperature"], g["subtalker_top_k"], g["subtalker_top_p"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--unpack", action="store_true")
    for field in dataclasses.fields(Sampling):
        parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    args = parser.parse_args()
    if args.unpack:
        talker, codec, _ = read(args.out)
        args.run.mkdir(parents=True, exist_ok=True)
        parts.save(parts.half(talker.state_dict()), args.run / "talker")
        parts.save(parts.half({k: v for k, v in codec.state_dict().items() if not k.startswith(("mel_head", "phone_head"))}), args.run / "codec")
        return
    sampling = Sampling(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Sampling)})
    write(parts.load(args.run / "talker"), parts.load(args.run / "codec"), args.tokenizer, args.out, sampling)


if __name__ == "__main__":
    main()
