"""Clone voices: the encoders against their goldens, voices from clips of every kind, and speech with them."""

from __future__ import annotations

import json
import shutil
import wave
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import conform
from engine.config import EngineConfig
from engine.errors import CheckpointError, EngineError, RequestRefused
from engine.loop import EngineLoop
from engine.messages import Append, AudioChunk, Done, Event, Failed, Finish, Hello, Open, Sampling, SpeechRequest, Welcome
from engine.model.checkpoint import Checkpoint, load_checkpoint, load_encoders
from engine.model.speaker import mel_spectrogram
from engine.model.voices import VoiceStore, make_voice, read_clip
from engine.stages import Stages
from engine.voices_cli import main as voice_command
from tests.conftest import FIXTURES

BASE = FIXTURES / "checkpoints" / "base17"
ENTRY = json.loads((FIXTURES / "manifest.json").read_text())["checkpoints"]["base17"]
CONFIG = EngineConfig(slots=2, positions=512, buckets=(1, 2))
RATE = 24000


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return load_checkpoint(BASE)


@pytest.fixture
def store(tmp_path: Path) -> VoiceStore:
    return VoiceStore(tmp_path / "voices")


def tone(seconds: float, rate: int = RATE, channels: int = 1, gain: float = 0.5, pitch_hz: float = 220.0) -> np.ndarray:
    """A buzz with a beat, s16 [samples, channels]."""
    t = np.arange(int(seconds * rate)) / rate
    wave_ = sum(np.sin(2 * np.pi * pitch_hz * n * t) / n for n in range(1, 8)) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * t))
    return np.repeat((wave_ / 2 * gain * 32767).astype(np.int16)[:, None], channels, 1)


def write_wav(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return write_wav(tmp_path / "clip.wav", tone(1.6))


# The maths


@pytest.mark.parametrize("case", [*ENTRY["cases"], "voice_prompts"])
def test_case_matches_the_official_code(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert conform.run(FIXTURES, [f"base17/{case}"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "array", "place"),
    [
        ("voice_prompts", "xvec_mel", (3, 7)),
        ("voice_prompts", "icl_short_speaker_embedding", (11,)),
        ("voice_prompts", "icl_long_codes", (16, 15)),
        ("icl_st_text_shorter", "prompt_embeds", (0, 20, 3)),
        ("icl_st_text_longer", "trailing_text_hidden", (0, 1, 3)),
        ("icl_st_text_longer", "ref_ids", (0, 4)),
        ("icl_ns", "wav_before_cut_0", (6 * 1920 + 1,)),
        ("icl_ns", "codes", (0, 7, 2)),
    ],
)
def test_one_wrong_number_in_a_golden_fails(case: str, array: str, place: tuple[int, ...], tmp_path: Path) -> None:
    prompts = ENTRY["voice_prompts"]["file"]
    cases = {} if case == "voice_prompts" else {case: ENTRY["cases"][case]}
    (tmp_path / "manifest.json").write_text(json.dumps({"checkpoints": {"base17": {**ENTRY, "cases": cases}}}))
    (tmp_path / "goldens" / "base17").mkdir(parents=True)
    shutil.copytree(BASE, tmp_path / "checkpoints" / "base17")
    shutil.copy(FIXTURES / prompts, tmp_path / prompts)
    file = tmp_path / (prompts if case == "voice_prompts" else ENTRY["cases"][case]["file"])
    arrays = dict(np.load(FIXTURES / file.relative_to(tmp_path)))
    arrays[array][place] += 1 if arrays[array].dtype.kind == "i" else np.float32(0.01)
    np.savez(file, **arrays)
    assert conform.run(tmp_path, [case]) == 1


def test_attention_of_the_encoder_has_no_window() -> None:
    """The config's sliding_window (12 here) is not applied: what was heard 2 s ago still moves the codes."""
    _, encoder = load_encoders(BASE)
    samples = torch.from_numpy(tone(2.5)[:, 0].astype(np.float32) / 32767)
    changed = samples.clone()
    changed[:1920] = 0
    with torch.inference_mode():
        latents = [encoder.encoder_transformer(encoder.encoder(part[None, None])[0].T) for part in (samples, changed)]
    assert (latents[0][-1] - latents[1][-1]).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model", lambda t: t.pop("speaker_encoder.fc.bias"), "tensor 'speaker_encoder.fc.bias' is missing"),
        ("model", lambda t: t.update({"speaker_encoder.fc.scale": torch.zeros(1)}), "unexpected tensor 'speaker_encoder.fc.scale'"),
        ("model", lambda t: t.update({"speaker_encoder.mfa.conv.bias": torch.zeros(3)}), "has shape [3], config.json asks for [48]"),
        ("speech_tokenizer/model", lambda t: t.pop("encoder.downsample.conv.weight"), "tensor 'encoder.downsample.conv.weight' is missing"),
        (
            "speech_tokenizer/model",
            lambda t: t.pop("encoder.quantizer.acoustic_residual_vector_quantizer.layers.16.codebook.initialized"),
            "layers.16.codebook.initialized' is missing",
        ),
    ],
)
def test_what_is_wrong_with_the_encoders_is_named(
    file: str, change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path, clip: Path, store: VoiceStore
) -> None:
    folder = Path(shutil.copytree(BASE, tmp_path / "base"))
    tensors = load_file(folder / f"{file}.safetensors")
    change(tensors)
    save_file(tensors, folder / f"{file}.safetensors")
    with pytest.raises(CheckpointError) as caught:
        make_voice(folder, "anna", clip, "one two", store)
    assert message in str(caught.value)
    assert store.cards() == []


# Clips


def test_a_clip_becomes_its_vector_and_codes(clip: Path, store: VoiceStore, base: Checkpoint) -> None:
    card = make_voice(BASE, "Anna", clip, " one two ", store)
    assert (card.name, card.text, card.seconds, card.model) == ("anna", "one two", 1.6, "base17")
    samples = torch.from_numpy(tone(1.6)[:, 0].astype(np.float32) / 32768)
    speaker, encoder = load_encoders(BASE)
    voice = store.load("ANNA", base.config, base.tokenizer)
    with torch.inference_mode():
        assert torch.allclose(voice.speaker.values, speaker(mel_spectrogram(samples, RATE, 128)), atol=1e-6)
        assert voice.reference is not None
        assert voice.reference.frames == tuple(map(tuple, encoder(samples).tolist()))
    assert len(voice.reference.frames) == 20
    assert base.tokenizer.decode(list(voice.reference.text)) == "one two"


def test_without_a_transcript_only_the_vector_is_kept(clip: Path, store: VoiceStore, base: Checkpoint) -> None:
    make_voice(BASE, "anna", clip, None, store)
    assert store.load("anna", base.config, base.tokenizer).reference is None
    assert set(load_file(store.folder / "anna.safetensors")) == {"speaker"}


def test_stereo_is_the_mean_of_its_channels(tmp_path: Path) -> None:
    samples = tone(2.0, channels=2)
    samples[:, 1] //= 2
    mono = read_clip(write_wav(tmp_path / "stereo.wav", samples), RATE)
    assert np.allclose(mono.numpy(), samples.mean(1) / 32768, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
def test_any_rate_becomes_24_khz(rate: int, tmp_path: Path) -> None:
    samples = read_clip(write_wav(tmp_path / "clip.wav", tone(2.0, rate), rate), RATE).numpy()
    assert abs(len(samples) - 2 * RATE) <= 64
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    assert abs(spectrum.argmax() * RATE / len(samples) - 220) < 2
    assert abs(float(np.abs(samples).max()) - float(np.abs(tone(2.0)).max()) / 32768) < 0.03


@pytest.mark.parametrize(("name", "codec"), [("clip.flac", "flac"), ("clip.ogg", "libopus"), ("clip.mkv", "pcm_f32le")])
def test_any_format_ffmpeg_reads_will_do(name: str, codec: str, tmp_path: Path, store: VoiceStore) -> None:
    with av.open(tmp_path / name, "w") as container:
        stream = container.add_stream(codec, rate=48000, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone(1.5, 48000).T, format="s16", layout="mono")
        frame.sample_rate = 48000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    assert abs(make_voice(BASE, "anna", tmp_path / name, None, store).seconds - 1.5) < 0.05


def test_a_long_clip_is_taken_and_a_minute_is_the_end(tmp_path: Path) -> None:
    assert len(read_clip(write_wav(tmp_path / "long.wav", tone(60.0, 8000), 8000), RATE)) == pytest.approx(60 * RATE, abs=64)
    with pytest.raises(RequestRefused, match="longer than 60 s; give 3 to 20 seconds"):
        read_clip(write_wav(tmp_path / "longer.wav", tone(61.0, 8000), 8000), RATE)


def bad_clips(folder: Path) -> dict[str, Path]:
    (folder / "text.wav").write_text("this is no audio at all\n" * 50)
    (folder / "empty.wav").write_bytes(b"")
    nan = np.full((RATE * 2, 1), np.nan, np.float32)
    with av.open(folder / "nan.wav", "w") as container:
        stream = container.add_stream("pcm_f32le", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(nan.T, format="flt", layout="mono")
        frame.sample_rate = RATE
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    with av.open(folder / "video.mkv", "w") as container:
        video = container.add_stream("ffv1", rate=10)
        video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        for packet in (*video.encode(av.VideoFrame(32, 32, "yuv420p")), *video.encode(None)):
            container.mux(packet)
    return {
        "cannot be read as audio (Invalid data found when processing input); give 3 to 20 seconds": folder / "text.wav",
        "does not exist; check the path": folder / "nowhere.wav",
        "is longer than 60 s; give 3 to 20 seconds": write_wav(folder / "two minutes.wav", tone(120.0, 8000), 8000),
        "too short to learn a voice from; give 3 to 20 seconds": write_wav(folder / "short.wav", tone(0.9)),
        "is silent": write_wav(folder / "silent.wav", tone(3.0, gain=0.0)),
        "is silent (its": write_wav(folder / "faint.wav", tone(3.0, gain=0.002)),
        "holds no audio": folder / "video.mkv",
        "samples that are no numbers": folder / "nan.wav",
        "cannot be read": folder / "empty.wav",
        "cannot be read as": folder,
    }


def test_a_bad_clip_is_refused_naming_field_and_remedy(tmp_path: Path, store: VoiceStore) -> None:
    for message, path in bad_clips(tmp_path).items():
        with pytest.raises(RequestRefused) as caught:
            make_voice(BASE, "anna", path, None, store)
        assert str(caught.value).startswith(f"clip: {path}") and message in str(caught.value), str(caught.value)
    assert store.cards() == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("../anna", None, "name: '../anna' cannot name a voice"),
        ("", None, "name: '' cannot name a voice"),
        ("anna", "👍 ...", "text: holds nothing that is said; give the clip's exact words, or leave text out"),
        ("anna", "  ", "text: holds nothing that is said"),
        ("anna", "one two " * 100, "text: 799 characters cannot be said in a clip of 1.6 s"),
    ],
)
def test_a_bad_name_or_transcript_is_refused(name: str, text: str | None, message: str, clip: Path, store: VoiceStore) -> None:
    with pytest.raises(RequestRefused) as caught:
        make_voice(BASE, name, clip, text, store)
    assert message in str(caught.value)


def test_only_base_makes_voices(clip: Path, store: VoiceStore) -> None:
    with pytest.raises(RequestRefused, match=r"model: .*cv17 is a custom_voice checkpoint.*Base"):
        make_voice(FIXTURES / "checkpoints" / "cv17", "anna", clip, None, store)


def test_a_name_is_taken_once(clip: Path, store: VoiceStore) -> None:
    make_voice(BASE, "anna", clip, None, store)
    with pytest.raises(RequestRefused, match=r"there is a voice 'anna' already; .*vivavoce voice remove anna"):
        make_voice(BASE, "ANNA", clip, None, store)


# The store


def test_voices_of_other_sizes_are_not_offered(clip: Path, store: VoiceStore, base: Checkpoint) -> None:
    make_voice(BASE, "anna", clip, None, store)
    card = json.loads((store.folder / "anna.json").read_text())
    (store.folder / "berta.json").write_text(json.dumps({**card, "name": "berta", "width": 2048, "model": "big"}))
    (store.folder / "broken.json").write_text("{")
    assert store.names(base.config) == ["anna"]
    with pytest.raises(RequestRefused, match="'berta' was made with big, which has other sizes"):
        store.load("berta", base.config, base.tokenizer)


def test_a_damaged_voice_says_so(clip: Path, store: VoiceStore, base: Checkpoint) -> None:
    make_voice(BASE, "anna", clip, "one two", store)
    (store.folder / "anna.safetensors").write_bytes(b"junk")
    with pytest.raises(RequestRefused, match="'anna' is damaged"):
        store.load("anna", base.config, base.tokenizer)
    Stages(base, CONFIG, store).warm_up()


def test_other_checkpoints_list_no_clones(clip: Path, store: VoiceStore, tiny: Checkpoint) -> None:
    make_voice(BASE, "anna", clip, None, store)
    assert Stages(tiny, CONFIG, store).info.voices == list(tiny.config.talker.speakers)


def test_a_user_without_a_home_is_told_where_to_name_a_folder(
    homeless: None,
    clip: Path,
    tiny: Checkpoint,
    base: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("VIVAVOCE_VOICES", raising=False)
    assert Stages(tiny, CONFIG).info.voices and Stages(base, CONFIG).info.voices == []
    with pytest.raises(RequestRefused, match="name one in VIVAVOCE_VOICES"):
        VoiceStore().load(None, base.config, base.tokenizer)
    for command in (["list"], ["remove", "anna"], ["add", "anna", str(clip), "--model", str(BASE)]):
        assert voice_command(command) == 1
        assert capsys.readouterr().err == (
            "vivavoce: voice: there is no folder for clone voices, for the user this runs as has no home; name one in VIVAVOCE_VOICES\n"
        )
    monkeypatch.setenv("VIVAVOCE_VOICES", str(tmp_path / "mine"))
    assert voice_command(["add", "anna", str(clip), "--model", str(BASE)]) == 0 and voice_command(["list"]) == 0


def test_command_line(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VIVAVOCE_VOICES", str(tmp_path / "mine"))
    assert voice_command(["list"]) == 0
    assert "no voices in" in capsys.readouterr().out
    assert voice_command(["add", "anna", str(clip), "--text", "one two", "--model", str(BASE)]) == 0
    assert voice_command(["add", "berta", str(clip), "--model", str(BASE)]) == 0
    assert voice_command(["list"]) == 0
    out = capsys.readouterr().out
    assert "anna: made of 1.6 s (with its transcript)" in out and "transcript  base17" in out and "timbre" in out
    assert voice_command(["remove", "Anna"]) == 0
    assert voice_command(["remove", "anna"]) == 1
    assert voice_command(["add", "carla", str(tmp_path / "none.wav"), "--model", str(BASE)]) == 1
    err = capsys.readouterr().err
    assert "vivavoce: name: no voice 'anna'" in err and "none.wav does not exist" in err
    assert [path.name for path in sorted((tmp_path / "mine").iterdir())] == ["berta.json", "berta.safetensors"]


# Speech


class Spoken:
    """Drives a loop by itself and keeps what comes out of each utterance."""

    def __init__(self, base: Checkpoint, store: VoiceStore, config: EngineConfig = CONFIG) -> None:
        self.events: list[Event] = []
        self.now_s = 0.0
        self.loop = EngineLoop(Stages(base, config, store), config, lambda client, event: self.events.append(event), lambda: self.now_s)

    def open(self, number: int, voice: str | None, *, live: bool = False, frames: int = 10, whole_text: bool = False) -> None:
        request = SpeechRequest(voice=voice, live=live, whole_text=whole_text, pace="file", max_frames=frames, sampling=Sampling(greedy=True))
        self.loop.handle(b"", Open(self.loop.epoch, number, request), self.now_s)

    def say(self, number: int, text: str, *, finish: bool = False) -> None:
        self.loop.handle(b"", Append(self.loop.epoch, number, text), self.now_s)
        if finish:
            self.loop.handle(b"", Finish(self.loop.epoch, number), self.now_s)

    def turns(self, count: int = 500) -> None:
        for _ in range(count):
            self.now_s += 0.001
            self.loop.turn(self.now_s)

    def pcm(self, number: int) -> bytes:
        return b"".join(event.pcm for event in self.events if isinstance(event, AudioChunk) and event.utterance == number)

    def done(self, number: int) -> Done:
        return next(event for event in self.events if isinstance(event, Done) and event.utterance == number)

    def refusal(self, number: int) -> str:
        return next(event.message for event in self.events if isinstance(event, Failed) and event.utterance == number)


TEXT = "the quick brown fox jumps over the lazy dog and then stops in the night"


def test_stored_voices_speak_by_name(store: VoiceStore, base: Checkpoint, tmp_path: Path) -> None:
    make_voice(BASE, "anna", write_wav(tmp_path / "a.wav", tone(1.6)), None, store)
    make_voice(BASE, "berta", write_wav(tmp_path / "b.wav", tone(1.6, pitch_hz=110)), None, store)
    make_voice(BASE, "carla", write_wav(tmp_path / "c.wav", tone(1.2)), "ten nine", store)
    spoken = Spoken(base, store)
    spoken.loop.handle(b"", Hello(), 0.0)
    welcome = spoken.events[0]
    assert isinstance(welcome, Welcome) and welcome.info.voices == ["anna", "berta", "carla"]
    spoken.loop.stages.warm_up()
    for number, voice in enumerate((None, "anna", "Berta", "carla")):
        spoken.open(number, voice)
        spoken.say(number, TEXT, finish=True)
    spoken.turns()
    assert [len(spoken.pcm(number)) for number in range(4)] == [2 * 10 * 1920] * 4
    assert spoken.pcm(0) == spoken.pcm(1) != spoken.pcm(2)
    assert len({spoken.pcm(number) for number in range(4)}) == 3


def test_a_reference_and_the_whole_text_in_the_prompt(store: VoiceStore, base: Checkpoint, tmp_path: Path) -> None:
    make_voice(BASE, "anna", write_wav(tmp_path / "clip.wav", tone(1.0)), "ten nine", store)
    spoken = Spoken(base, store)
    spoken.open(0, "anna", whole_text=True)
    spoken.say(0, TEXT, finish=True)
    spoken.open(1, "anna")
    spoken.say(1, TEXT, finish=True)
    spoken.turns()
    assert spoken.pcm(0) and spoken.pcm(1) and spoken.pcm(0) != spoken.pcm(1)


@pytest.mark.parametrize(("seconds", "ref_text"), [(1.0, "calm voice ten nine one two three four"), (1.0, "ten"), (3.0, "ten nine"), (6.0, "ten")])
def test_live_text_with_a_reference_sounds_as_the_whole_text(
    seconds: float, ref_text: str, store: VoiceStore, base: Checkpoint, tmp_path: Path
) -> None:
    """The prompt takes the tokens that lie under the reference; the rest may arrive while it speaks."""
    make_voice(BASE, "anna", write_wav(tmp_path / "clip.wav", tone(seconds)), ref_text, store)
    reference = store.load("anna", base.config, base.tokenizer).reference
    assert reference is not None
    spoken = Spoken(base, store)
    spoken.open(0, "anna")
    spoken.say(0, TEXT, finish=True)
    spoken.turns()
    spoken.open(1, "anna", live=True)
    for word in TEXT.split(" "):
        spoken.say(1, word if word == "night" else word + " ")
        spoken.turns(3)
    spoken.now_s += 0.7
    spoken.turns(30)
    assert bool(spoken.pcm(1)) == (seconds < 6.0), "it begins once the text reaches beyond the reference"
    spoken.say(1, "", finish=True)
    spoken.turns()
    whole, live = spoken.pcm(0), spoken.pcm(1)
    # End of speech is held back while text may come, so the live one may be longer.
    assert len(whole) > 0 and live[: len(whole)] == whole
    assert len(live) == 2 * 1920 * 10 or len(live) == len(whole)


def test_a_text_that_ends_under_the_reference_is_eaten_at_once(store: VoiceStore, base: Checkpoint, tmp_path: Path) -> None:
    make_voice(BASE, "anna", write_wav(tmp_path / "clip.wav", tone(4.0)), "ten nine", store)
    spoken = Spoken(base, store)
    spoken.open(0, "anna", live=True, frames=4)
    spoken.say(0, "one two ")
    spoken.turns(500)
    assert spoken.events == [], "the prompt needs more text, or its end"
    spoken.say(0, "three", finish=True)
    spoken.turns()
    chunks = [event for event in spoken.events if isinstance(event, AudioChunk)]
    assert {chunk.text_until for chunk in chunks} == {len("one two three")}
    assert spoken.done(0).samples == 4 * 1920


def test_a_pause_ends_a_text_that_is_shorter_than_the_prompt_wants(store: VoiceStore, base: Checkpoint, tmp_path: Path) -> None:
    make_voice(BASE, "anna", write_wav(tmp_path / "clip.wav", tone(4.0)), "ten nine", store)
    spoken = Spoken(base, store)
    spoken.open(0, "anna", live=True, frames=4)
    spoken.say(0, "one two ")
    spoken.turns(2000)
    assert spoken.done(0).text_until == len("one two ") and spoken.done(0).samples == 4 * 1920


def test_a_reference_too_long_for_the_positions_is_refused(store: VoiceStore, base: Checkpoint, tmp_path: Path) -> None:
    make_voice(BASE, "anna", write_wav(tmp_path / "clip.wav", tone(20.0)), "ten nine", store)
    spoken = Spoken(base, store, EngineConfig(slots=1, positions=300, buckets=(1,)))
    spoken.open(0, "anna")
    spoken.loop.stages.warm_up()
    assert "voice: 2" in spoken.refusal(0) and "shorter clip" in spoken.refusal(0)


def test_without_a_voice_the_remedy_is_named(store: VoiceStore, base: Checkpoint, clip: Path) -> None:
    spoken = Spoken(base, store)
    spoken.loop.stages.warm_up()
    spoken.open(0, None)
    assert spoken.refusal(0).startswith("voice: a Base checkpoint speaks with clone voices") and "vivavoce voice add" in spoken.refusal(0)
    make_voice(BASE, "anna", clip, None, store)
    spoken.open(1, "berta")
    assert "'berta' is not in" in spoken.refusal(1) and "it has: anna" in spoken.refusal(1)
    spoken.open(2, None)
    spoken.say(2, "one two", finish=True)
    spoken.turns()
    assert spoken.pcm(2), "a voice added now is spoken with now"


def test_a_voice_made_anew_under_the_same_name_sounds_anew(store: VoiceStore, base: Checkpoint, tmp_path: Path) -> None:
    spoken = Spoken(base, store)
    for number, pitch_hz in enumerate((220.0, 110.0)):
        make_voice(BASE, "anna", write_wav(tmp_path / "clip.wav", tone(1.5, pitch_hz=pitch_hz)), None, store)
        spoken.open(number, "anna")
        spoken.say(number, TEXT, finish=True)
        spoken.turns()
        store.remove("anna")
    assert spoken.pcm(0) != spoken.pcm(1)
    with pytest.raises(EngineError):
        spoken.loop.stages.voice("anna")
