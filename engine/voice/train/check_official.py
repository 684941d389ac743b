"""The released modelling code must get the same greedy codes and the same waveform from the checkpoint as our classes.

    python -m engine.voice.train.check_official VOICE_FOLDER QWEN_TTS_FOLDER

QWEN_TTS_FOLDER is an unpacked wheel of `qwen-tts`; needs the transformers version that it names. Only its model classes are
imported, not its wrapper. The tokenizer is checked through transformers' own Qwen2 classes (slow and fast).
"""

import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file

from . import tokenizer
from .export import read
from .sizes import ASSISTANT, IM_END, IM_START, NEWLINE, VOICE
from .talker_model import Sampling, generate

TEXTS = ["The children laughed as the puppy chased its own tail around the yard.", "Dr. Smith paid $42.50 on March 3rd, 1987 at 7:45 pm."]
FRAMES = 48
ANY_TEXT = [*TEXTS, "", " leading space", "ÀÉÎ naïve café", "你好，世界", "emoji 😀!", "iPhone 15's\ttab\nnew line", "ASSISTANT assistant assist"]


def main() -> None:
    voice, package = Path(sys.argv[1]), Path(sys.argv[2])
    for name in ("qwen_tts", "qwen_tts.core", "qwen_tts.core.models", "qwen_tts.inference", "qwen_tts.core.tokenizer_12hz"):
        sys.modules[name] = types.ModuleType(name)  # skips the packages' own imports
        sys.modules[name].__path__ = [str(package / name.replace(".", "/"))]
    sys.modules["qwen_tts.inference.qwen3_tts_tokenizer"] = types.SimpleNamespace(Qwen3TTSTokenizer=None)
    from transformers import Qwen2Tokenizer, Qwen2TokenizerFast

    for name, attributes in (("librosa", {}), ("librosa.filters", {"mel": None})):  # only the speaker encoder uses it
        sys.modules.setdefault(name, types.SimpleNamespace(**attributes))
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2DecoderConfig
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Decoder

    ours = tokenizer.load(voice)
    for cls in (Qwen2Tokenizer, Qwen2TokenizerFast):
        theirs = cls.from_pretrained(str(voice))
        for text in ANY_TEXT:
            a, b = theirs(tokenizer.template(text))["input_ids"], ours.encode(tokenizer.template(text), add_special_tokens=False).ids
            assert a == b, (cls.__name__, text, a, b)
            assert a[:2] == [IM_START, ASSISTANT] and a[-5:] == [IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE]
    print("tokenizer: same ids,", len(ANY_TEXT), "texts")
    config = Qwen3TTSConfig(**json.loads((voice / "config.json").read_text()))
    for c in (config, config.talker_config, config.talker_config.code_predictor_config):
        c._attn_implementation = "sdpa"
    model = Qwen3TTSForConditionalGeneration(config).float().eval()
    print("model:", model.load_state_dict({k: v.float() for k, v in load_file(voice / "model.safetensors").items()}))
    decoder_config = Qwen3TTSTokenizerV2DecoderConfig(**json.loads((voice / "speech_tokenizer/config.json").read_text())["decoder_config"])
    decoder_config._attn_implementation = "sdpa"
    decoder = Qwen3TTSTokenizerV2Decoder(decoder_config).float().eval()
    print(
        "decoder:",
        decoder.load_state_dict({k.removeprefix("decoder."): v.float() for k, v in load_file(voice / "speech_tokenizer/model.safetensors").items()}),
    )
    talker, codec, _ = read(voice)
    for text in TEXTS:
        ids = tokenizer.target_ids(ours, text)
        whole_ids = torch.tensor([ours.encode(tokenizer.template(text), add_special_tokens=False).ids])
        for streaming in (True, False):
            for language in ("english", "auto"):
                mine, _ = generate(
                    talker, [ids], streaming, Sampling(temperature=0, predictor_temperature=0), english=language == "english", limit=FRAMES
                )
                theirs, _ = model.generate(
                    input_ids=[whole_ids],
                    languages=[language],
                    speakers=[VOICE],
                    non_streaming_mode=not streaming,
                    do_sample=False,
                    subtalker_dosample=False,
                    max_new_tokens=FRAMES + 1,
                    repetition_penalty=1.0,
                )
                theirs = theirs[0].T
                n = min(theirs.shape[1], mine[0].shape[1])
                equal = (theirs[:, :n] == mine[0][:, :n]).float().mean()
                layout = "streaming" if streaming else "whole text"
                print(f"{layout}, {language}: frames {mine[0].shape[1]} and {theirs.shape[1]}, equal codes {equal:.4f}", flush=True)
    with torch.inference_mode():
        a, b = codec.decode(mine[0][None]), decoder(mine[0][None])
    print(f"waveform: largest difference {(a - b).abs().max():.1e} at a deviation of {a.std():.3f}")


if __name__ == "__main__":
    main()
