"""The pure parts of the voice's recipe."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.voice.train import tokenizer
from engine.voice.train.codec_model import Codec
from engine.voice.train.corpus import END, NONE, lay_out, spoken_tokens
from engine.voice.train.data import LABEL_SHIFT
from engine.voice.train.sizes import (
    ASSISTANT,
    BPE_ENTRIES,
    EOS,
    FRAME,
    IM_END,
    IM_START,
    LEAD_FRAMES,
    LEAD_WHOLE,
    NEWLINE,
    TTS_EOS,
    TTS_PAD,
    CodecSizes,
    TalkerSizes,
)
from engine.voice.train.talker_model import Sampling, Talker, generate, prompt

VOICE = Path(__file__).parents[3] / "engine/voice"
SMALL_TALKER = TalkerSizes(
    hidden=32, heads=2, kv_heads=1, head_dim=16, inter=32, layers=2, text_hidden=16, predictor_hidden=16, predictor_heads=1, predictor_inter=16
)


def test_streaming_layout_feeds_one_token_a_frame() -> None:
    ids, n = [5, 6, 7], 10
    text, codec, fed, label, token, target = lay_out(ids, np.linspace(0, 3, n, dtype=np.float32), True, True, 100)
    rows, codec_rows, rest = prompt(ids, True)
    p = len(rows)
    assert text[:p].tolist() == rows and codec[:p].tolist() == codec_rows
    assert text[p:].tolist() == rest + [TTS_PAD] * (n - len(rest)) and rest == [6, 7, TTS_EOS]
    assert fed[p:].tolist() == list(range(100, 100 + n)) and (fed[:p] == NONE).all()
    assert label[p - 1 : p - 1 + n].tolist() == list(range(100, 100 + n)) and label[-1] == END
    assert token[p - 1 : p + 3].tolist() == [0, 1, 2, 3] and target[-1] == len(ids)


def test_whole_text_layout_keeps_less_leading_silence() -> None:
    ids, n = [5, 6, 7], 10
    _, _, fed, label, token, _ = lay_out(ids, np.zeros(n, np.float32), False, False, 100)
    skipped = LEAD_FRAMES - LEAD_WHOLE
    assert fed[fed >= 0].tolist() == list(range(100 + skipped, 100 + n)) and (label >= 0).sum() == n - skipped
    assert token[token >= 0].tolist() == [0, 1, 2, 3]


def test_spoken_token_follows_the_characters() -> None:
    spoken = spoken_tokens([(0, 2), (2, 4), (4, 5)], np.asarray([0, 1, 2, 3, 4, 5], np.float32), 5)
    assert (np.diff(spoken) >= 0).all() and spoken[-1] == 3 and spoken[2] == pytest.approx(0.6)


def test_batched_generation_equals_single() -> None:
    torch.manual_seed(0)
    net, greedy = Talker(SMALL_TALKER).eval(), Sampling(temperature=0, predictor_temperature=0)
    for streaming in (True, False):
        both, _ = generate(net, [[1, 2, 3, 4, 5], [6, 7]], streaming, greedy, limit=8)
        alone, _ = generate(net, [[6, 7]], streaming, greedy, limit=8)
        assert torch.equal(both[1][:, : alone[0].shape[1]], alone[0]) and both[0].max() < EOS


def test_codec_is_causal_and_makes_whole_frames() -> None:
    torch.manual_seed(0)
    codec = Codec(CodecSizes(codebook=8, groups=3, codebook_dim=16, latent=16, heads=1, inter=16, decoder_dim=32), encoder=False).eval()
    codes = torch.randint(0, 8, (1, 3, 9))
    with torch.inference_mode():
        whole, start = codec.decode(codes), codec.decode(codes[..., :5])
    assert whole.shape == (1, 1, 9 * FRAME)
    torch.testing.assert_close(whole[..., : 5 * FRAME], start, atol=1e-5, rtol=1e-4)


def test_labels_are_shifted_by_60_ms() -> None:
    assert LABEL_SHIFT * 5 == 60


@pytest.mark.parametrize("text", ["Hello.", "", " x", "ÀÉ naïve", "你好", "😀!", "a\tb", "$5, 10:30, Dr. X", "assistant"])
def test_any_text_has_ids_between_head_and_tail(text: str) -> None:
    tok = tokenizer.load(VOICE)
    ids = tok.encode(tokenizer.template(text), add_special_tokens=False).ids
    assert ids[:3] == [IM_START, ASSISTANT, NEWLINE] and ids[-5:] == [IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE]
    assert max(ids[3:-5], default=0) < BPE_ENTRIES
