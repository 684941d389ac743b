"""The sizes of the embedded voice and the ids of its special tokens; everything else reads them from here.

A frame is 80 ms: 1,920 samples at 24 kHz. Names follow the configuration files of Qwen3-TTS 12 Hz.
"""

from dataclasses import dataclass

SAMPLE_RATE = 24_000
FRAME = 1_920  # samples in a frame
FRAMES_AN_HOUR = 45_000
N_PHONES = 180  # ids of the teacher's phone alphabet (only labels during training)
LEAD_FRAMES = 4  # silence at the start of an utterance: look-ahead while text is streamed
LEAD_WHOLE = 1  # how much of it is kept when the whole text comes first


@dataclass(frozen=True)
class CodecSizes:
    """Quantiser and decoder of `speech_tokenizer/`, and the encoder that exists only in training."""

    codebook: int = 256  # entries of a codebook
    groups: int = 8  # codebooks: one of its own (speech sounds), then a residual chain
    codebook_dim: int = 192  # width after the quantiser's output projection; codes are half as wide
    latent: int = 192
    heads: int = 3
    inter: int = 512
    layers: int = 2
    window: int = 24  # frames that attention sees, itself included
    decoder_dim: int = 256  # halves at each of the four upsampling blocks
    encoder_dim: int = 256  # training only
    encoder_layers: int = 2  # training only

    @property
    def vq_dim(self) -> int:
        return self.codebook_dim // 2


@dataclass(frozen=True)
class TalkerSizes:
    """Talker and Predictor of `model.safetensors`."""

    codebook: int = 256
    groups: int = 8
    vocab: int = 256 + 1024  # generation suppresses exactly the last 1,024 ids (but end-of-speech)
    hidden: int = 320
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    inter: int = 624
    layers: int = 6
    text_vocab: int = 512
    text_hidden: int = 192
    predictor_hidden: int = 192
    predictor_heads: int = 3
    predictor_kv_heads: int = 1
    predictor_inter: int = 512
    predictor_layers: int = 2


CODEC, TALKER = CodecSizes(), TalkerSizes()
VOICE = "heart"

# codec-side special ids: the first of the last 1,024 ids of the talker's vocabulary
PAD, BOS, EOS, THINK, NOTHINK, THINK_BOS, THINK_EOS, ENGLISH, SPEAKER = range(256, 265)

# text-side ids: 479 byte-level BPE entries, then the released tokenizer's 33 added tokens in their order
BPE_ENTRIES = 479
ADDED_TOKENS: list[tuple[str, bool]] = [
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
    ("<|audio_start|>", True),
    ("<|audio_end|>", True),
    ("<tts_pad>", True),
    ("<tts_text_bos>", True),
    ("<tts_text_eod>", True),
    ("<tts_text_bos_single>", True),
    ("<|audio_pad|>", True),
]
_added = {name: BPE_ENTRIES + k for k, (name, _) in enumerate(ADDED_TOKENS)}
IM_START, IM_END = _added["<|im_start|>"], _added["<|im_end|>"]
TTS_PAD, TTS_BOS, TTS_EOS = _added["<tts_pad>"], _added["<tts_text_bos>"], _added["<tts_text_eod>"]
NEWLINE = 198  # byte order of the released vocabulary: "\n" is 198 there too
ASSISTANT = BPE_ENTRIES - 1  # the word "assistant" is the last BPE entry
