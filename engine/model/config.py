"""What a checkpoint's config.json files say, as typed values. Every size in the engine comes from here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

# The last 1,024 ids of the Talker's vocabulary are control ids; all but end-of-speech are never drawn (reference, section 8).
CONTROL_IDS = 1024


@dataclass(frozen=True)
class TransformerConfig:
    """A stack of pre-norm Llama-like layers: Talker, Code Predictor and the codec's transformer."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float


@dataclass(frozen=True)
class TalkerConfig:
    body: TransformerConfig
    vocab: int
    text_vocab: int
    text_hidden: int
    groups: int
    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int
    languages: dict[str, int]
    speakers: dict[str, int]
    dialects: dict[str, str]


@dataclass(frozen=True)
class PredictorConfig:
    body: TransformerConfig
    vocab: int
    groups: int


@dataclass(frozen=True)
class CodecConfig:
    body: TransformerConfig
    codebook_size: int
    codebook_dim: int
    latent: int
    decoder_dim: int
    groups: int
    window: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]
    sample_rate: int

    @property
    def samples_per_frame(self) -> int:
        product = 1
        for factor in (*self.upsample_rates, *self.upsampling_ratios):
            product *= factor
        return product


@dataclass(frozen=True)
class SpeakerEncoderConfig:
    """`channels`, `kernels` and `dilations` have one entry a layer: the first, the blocks, the last."""

    mels: int
    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    dilations: tuple[int, ...]
    attention: int
    scale: int
    squeezed: int
    width: int
    sample_rate: int


@dataclass(frozen=True)
class CodecEncoderConfig:
    """`groups` of the `quantizers` are kept; the first `semantic` of them have a projection of their own."""

    body: TransformerConfig
    filters: int
    kernel: int
    residual_kernel: int
    last_kernel: int
    compress: int
    ratios: tuple[int, ...]
    codebook_size: int
    codebook_dim: int
    quantizers: int
    semantic: int
    groups: int


@dataclass(frozen=True)
class GenerationDefaults:
    """generation_config.json, with the official hard defaults where the file or a field is missing."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    subtalker_dosample: bool = True
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0
    max_new_tokens: int = 2048
    frames_per_char: float | None = None
    """Ours, not in released files: speech ends after so many frames a character of text, unless it has ended before. For voices that
    would not end by themselves."""


@dataclass(frozen=True)
class ModelConfig:
    size: str
    type: str
    im_start: int
    im_end: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    talker: TalkerConfig
    predictor: PredictorConfig
    codec: CodecConfig
    generation: GenerationDefaults

    @property
    def clones_voices(self) -> bool:
        """Whether voices come from stored clips: Base has none of its own, unless fine-tuning gave it some."""
        return self.type == "base" and not self.talker.speakers

    @property
    def takes_instructions(self) -> bool:
        """The 0.6B CustomVoice model ignores instructions, Base has none (reference, section 6)."""
        return self.type != "base" and self.size != "0b6"


class _Fields:
    """One JSON object, read field by field with errors that name file and field."""

    def __init__(self, where: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise CheckpointError(f"{where}: expected a JSON object")
        self.where, self.data = where, data

    def of(self, name: str) -> _Fields:
        return _Fields(f"{self.where}: {name}", self.get(name))

    def get(self, name: str) -> Any:
        if self.data.get(name) is None:
            raise CheckpointError(f"{self.where}: field '{name}' is missing")
        return self.data[name]

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.data.get(name) if default is not None else self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.where}: field '{name}' should be an integer, found {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.data.get(name) if default is not None else self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.where}: field '{name}' should be a number, found {value!r}")
        return float(value)

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise CheckpointError(f"{self.where}: field '{name}' should be a list of integers, found {value!r}")
        return tuple(value)

    def body(self) -> TransformerConfig:
        heads = self.integer("num_attention_heads")
        return TransformerConfig(
            hidden=self.integer("hidden_size"),
            intermediate=self.integer("intermediate_size"),
            layers=self.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=self.integer("num_key_value_heads", heads),
            head_dim=self.integer("head_dim", self.integer("hidden_size") // heads),
            rope_theta=self.number("rope_theta", 10000.0),
            eps=self.number("rms_norm_eps", 1e-6),
        )


def read_json(path: Path) -> Any:
    """A JSON file of the checkpoint. Raises CheckpointError if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: file is missing; a checkpoint folder holds config.json, model.safetensors, the tokenizer files and speech_tokenizer/"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None


def load_config(folder: Path) -> ModelConfig:
    """Read config.json, speech_tokenizer/config.json and generation_config.json. Raises CheckpointError naming file and field."""
    top = _Fields(str(folder / "config.json"), read_json(folder / "config.json"))
    if top.data.get("model_type") != "qwen3_tts":
        raise CheckpointError(f"{top.where}: model_type is {top.data.get('model_type')!r}, expected 'qwen3_tts'")
    if top.data.get("tokenizer_type", "qwen3_tts_tokenizer_12hz") != "qwen3_tts_tokenizer_12hz":
        raise CheckpointError(f"{top.where}: tokenizer_type is {top.data['tokenizer_type']!r}, only the 12 Hz codec is supported")
    kind = str(top.get("tts_model_type"))
    if kind not in ("custom_voice", "voice_design", "base"):
        raise CheckpointError(f"{top.where}: tts_model_type is {kind!r}, expected custom_voice, voice_design or base")

    talker = top.of("talker_config")
    predictor = talker.of("code_predictor_config")
    speech = _Fields(str(folder / "speech_tokenizer" / "config.json"), read_json(folder / "speech_tokenizer" / "config.json"))
    if speech.data.get("model_type") != "qwen3_tts_tokenizer_12hz":
        raise CheckpointError(f"{speech.where}: model_type is {speech.data.get('model_type')!r}, expected 'qwen3_tts_tokenizer_12hz'")
    decoder = speech.of("decoder_config")
    groups = talker.integer("num_code_groups")
    for fields, name in ((predictor, "num_code_groups"), (decoder, "num_quantizers")):
        if fields.integer(name, groups) != groups:
            raise CheckpointError(f"{fields.where}: {name} is {fields.integer(name)}, but talker_config has {groups} code groups")
    codebook, vocab = decoder.integer("codebook_size"), predictor.integer("vocab_size")
    if codebook != vocab:
        raise CheckpointError(f"{decoder.where}: codebook_size {codebook} differs from the code predictor's vocab_size {vocab}")

    dialects = talker.data.get("spk_is_dialect") or {}
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").exists():
        fields = _Fields(str(folder / "generation_config.json"), read_json(folder / "generation_config.json"))
        generation = fields.data
        if generation.get("frames_per_char") is not None and not fields.number("frames_per_char") > 0:
            raise CheckpointError(
                f"{fields.where}: field 'frames_per_char' should be above 0, found {generation['frames_per_char']!r}; or leave it out"
            )
    known = GenerationDefaults.__dataclass_fields__
    return ModelConfig(
        size=str(top.data.get("tts_model_size", "")),
        type=kind,
        im_start=top.integer("im_start_token_id"),
        im_end=top.integer("im_end_token_id"),
        tts_pad=top.integer("tts_pad_token_id"),
        tts_bos=top.integer("tts_bos_token_id"),
        tts_eos=top.integer("tts_eos_token_id"),
        talker=TalkerConfig(
            body=talker.body(),
            vocab=talker.integer("vocab_size"),
            text_vocab=talker.integer("text_vocab_size"),
            text_hidden=talker.integer("text_hidden_size"),
            groups=groups,
            pad=talker.integer("codec_pad_id"),
            bos=talker.integer("codec_bos_id"),
            eos=talker.integer("codec_eos_token_id"),
            think=talker.integer("codec_think_id"),
            nothink=talker.integer("codec_nothink_id"),
            think_bos=talker.integer("codec_think_bos_id"),
            think_eos=talker.integer("codec_think_eos_id"),
            languages={name.lower(): int(row) for name, row in (talker.data.get("codec_language_id") or {}).items()},
            speakers={name.lower(): int(row) for name, row in (talker.data.get("spk_id") or {}).items()},
            dialects={name.lower(): str(value) for name, value in dialects.items() if value},
        ),
        predictor=PredictorConfig(body=predictor.body(), vocab=predictor.integer("vocab_size"), groups=groups),
        codec=CodecConfig(
            body=decoder.body(),
            codebook_size=decoder.integer("codebook_size"),
            codebook_dim=decoder.integer("codebook_dim"),
            latent=decoder.integer("latent_dim"),
            decoder_dim=decoder.integer("decoder_dim"),
            groups=groups,
            window=decoder.integer("sliding_window"),
            upsample_rates=decoder.integers("upsample_rates", (8, 5, 4, 3)),
            upsampling_ratios=decoder.integers("upsampling_ratios", (2, 2)),
            sample_rate=speech.integer("output_sample_rate", 24000),
        ),
        generation=GenerationDefaults(**{name: value for name, value in generation.items() if name in known and value is not None}),
    )


def load_speaker_encoder_config(folder: Path) -> SpeakerEncoderConfig:
    """What a Base checkpoint says about its speaker encoder; the released files leave much to class defaults."""
    top = _Fields(str(folder / "config.json"), read_json(folder / "config.json"))
    speaker = top.of("speaker_encoder_config")
    return SpeakerEncoderConfig(
        mels=speaker.integer("mel_dim", 128),
        channels=speaker.integers("enc_channels", (512, 512, 512, 512, 1536)),
        kernels=speaker.integers("enc_kernel_sizes", (5, 3, 3, 3, 1)),
        dilations=speaker.integers("enc_dilations", (1, 2, 3, 4, 1)),
        attention=speaker.integer("enc_attention_channels", 128),
        scale=speaker.integer("enc_res2net_scale", 8),
        squeezed=speaker.integer("enc_se_channels", 128),
        width=speaker.integer("enc_dim"),
        sample_rate=speaker.integer("sample_rate", 24000),
    )


def load_codec_encoder_config(folder: Path) -> CodecEncoderConfig:
    """What a checkpoint says about its codec's encoder, which only Base uses; much is left to class defaults here, too."""
    speech = _Fields(str(folder / "speech_tokenizer" / "config.json"), read_json(folder / "speech_tokenizer" / "config.json"))
    encoder = speech.of("encoder_config")
    return CodecEncoderConfig(
        body=replace(encoder.body(), eps=encoder.number("norm_eps", 1e-5)),
        filters=encoder.integer("num_filters", 64),
        kernel=encoder.integer("kernel_size", 7),
        residual_kernel=encoder.integer("residual_kernel_size", 3),
        last_kernel=encoder.integer("last_kernel_size", 3),
        compress=encoder.integer("compress", 2),
        ratios=encoder.integers("upsampling_ratios", (8, 6, 5, 4)),
        codebook_size=encoder.integer("codebook_size", 2048),
        codebook_dim=encoder.integer("codebook_dim", 256),
        quantizers=encoder.integer("num_quantizers", 32),
        semantic=encoder.integer("num_semantic_quantizers", 1),
        groups=speech.integer("encoder_valid_num_quantizers", 16),
    )
