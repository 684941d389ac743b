"""Clone voices: made once from a clip and a Base checkpoint's encoders, kept in a folder, spoken with by name.

A voice is two files, NAME.safetensors (`speaker` [width]; with a transcript also `codes` [frames, groups]) and NAME.json."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from itertools import chain
from pathlib import Path

import av
import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.characters import is_speakable
from engine.errors import RequestRefused
from engine.home import data_folder
from engine.model.checkpoint import checkpoint_name, load_encoders
from engine.model.config import ModelConfig, load_config
from engine.model.prompt import CloneVoice, Reference, SpeakerVector
from engine.model.speaker import mel_spectrogram
from engine.model.text import Tokenizer

log = logging.getLogger(__name__)

SHORTEST_S, LONGEST_S = 1.0, 60.0
GOOD_LENGTH = "give 3 to 20 seconds of one person speaking"
SILENCE_DBFS = -50.0
"""A clip whose loudest tenth of a second has less RMS than this is silent."""
MOST_CHARS_PER_S = 40
"""No one says more characters in a second: a longer transcript belongs to another clip."""
_NAME = re.compile(r"\w[\w.-]{0,63}")


class VoiceCard(msgspec.Struct, frozen=True):
    """NAME.json. `text` is what the clip says, None for a voice of the speaker vector alone; `model` is what made the voice."""

    name: str
    text: str | None
    width: int
    groups: int
    codebook: int
    seconds: float
    model: str

    def suits(self, config: ModelConfig) -> bool:
        """Whether a checkpoint can speak with this voice: vectors and codes are bound to its sizes."""
        return (self.width, self.groups, self.codebook) == (config.talker.body.hidden, config.talker.groups, config.predictor.vocab)


class VoiceStore:
    """A folder of voices. It is read anew at every question, so a voice added now can be spoken with now."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` None takes VIVAVOCE_VOICES, or a folder below the user's data folder."""
        self._told: set[Path] = set()
        self._folder = folder or _usual_folder()

    @property
    def folder(self) -> Path:
        """Where they are. Raises RequestRefused if nobody has said, and the user has no home."""
        if self._folder is None:
            what = "voice: there is no folder for clone voices, for the user this runs as has no home; name one in VIVAVOCE_VOICES"
            raise RequestRefused(what, code="unknown_voice")
        return self._folder

    def cards(self) -> list[VoiceCard]:
        """Every stored voice, by name. A card that cannot be read is left out, and logged once."""
        cards: list[VoiceCard] = []
        if self._folder is None:
            return cards
        for path in sorted(self.folder.glob("*.json")):
            try:
                cards.append(msgspec.json.decode(path.read_bytes(), type=VoiceCard))
            except (OSError, msgspec.DecodeError) as error:
                if path not in self._told:
                    log.error("%s: not a voice (%s)", path, error)
                self._told.add(path)
        return cards

    def names(self, config: ModelConfig) -> list[str]:
        """The voices a checkpoint can speak with; only a Base checkpoint can."""
        return [card.name for card in self.cards() if card.suits(config)] if config.clones_voices else []

    def load(self, name: str | None, config: ModelConfig, tokenizer: Tokenizer) -> CloneVoice:
        """A stored voice ready for a prompt, the first if `name` is None. Raises RequestRefused."""
        known = {card.name: card for card in self.cards()}
        suitable = [card.name for card in known.values() if card.suits(config)]
        wanted = name.lower() if name else next(iter(suitable), None)
        if wanted is None:
            raise RequestRefused(
                f"voice: a Base checkpoint speaks with clone voices, and {self.folder} has none for it; "
                "make one with `vivavoce voice add NAME clip.wav`",
                code="unknown_voice",
            )
        if wanted not in known:
            raise RequestRefused(f"voice: '{name}' is not in {self.folder}; it has: {', '.join(suitable) or 'none'}", code="unknown_voice")
        card = known[wanted]
        if wanted not in suitable:
            raise RequestRefused(
                f"voice: '{name}' was made with {card.model}, which has other sizes; make it again with this checkpoint", code="unknown_voice"
            )
        path = self._path(wanted, "safetensors")
        try:
            tensors = load_file(path)
            speaker = SpeakerVector(hashlib.sha256(tensors["speaker"].numpy().tobytes()).hexdigest(), tensors["speaker"])
            frames = () if card.text is None else tuple(tuple(frame) for frame in tensors["codes"].tolist())
        except (OSError, SafetensorError, KeyError) as error:
            raise RequestRefused(f"voice: '{name}' is damaged: {path}: {error}; remove it and make it again", code="unknown_voice") from None
        return CloneVoice(speaker, None if card.text is None else Reference(tuple(tokenizer.target(card.text)[1]), frames))

    def save(self, card: VoiceCard, speaker: Tensor, codes: Tensor | None) -> None:
        """Store a voice. Its card comes last: a name is listed once the voice is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {"speaker": speaker.contiguous()}
        if codes is not None:
            tensors["codes"] = codes.contiguous()
        save_file(tensors, self._path(card.name, "safetensors"))
        self._path(card.name, "json").write_bytes(msgspec.json.format(msgspec.json.encode(card)) + b"\n")

    def remove(self, name: str) -> None:
        """Forget a voice. Raises RequestRefused if there is none of that name."""
        name = checked_name(name)
        if not self._path(name, "json").exists():
            raise RequestRefused(f"name: no voice '{name}' in {self.folder}; `vivavoce voice list` shows what is there", code="unknown_voice")
        self._path(name, "json").unlink()
        self._path(name, "safetensors").unlink(missing_ok=True)

    def __contains__(self, name: str) -> bool:
        return self._path(name, "json").exists()

    def _path(self, name: str, ending: str) -> Path:
        return self.folder / f"{name}.{ending}"


def _usual_folder() -> Path | None:
    if named := os.environ.get("VIVAVOCE_VOICES"):
        return Path(named)
    data = data_folder()
    return None if data is None else data / "voices"


def checked_name(name: str) -> str:
    """The name in lower case. Raises RequestRefused if it cannot name a voice."""
    if not _NAME.fullmatch(name):
        raise RequestRefused(f"name: {name!r} cannot name a voice; use up to 64 letters, digits, '-', '_' and '.', beginning with a letter or digit")
    return name.lower()


def make_voice(folder: Path, name: str, clip: Path, text: str | None, store: VoiceStore | None = None) -> VoiceCard:
    """Make a voice of a clip and store it. `text` is what is said in the clip: with it the voice carries the clip's manner of
    speaking, without it the speaker's timbre alone.

    Raises RequestRefused naming what is wrong with name, clip or text, and CheckpointError."""
    store = store or VoiceStore()
    name = checked_name(name)
    if name in store:
        raise RequestRefused(f"name: there is a voice '{name}' already; choose another name, or remove it with `vivavoce voice remove {name}`")
    config = load_config(folder)
    if config.type != "base":
        raise RequestRefused(f"model: {folder} is a {config.type} checkpoint, which has no speaker encoder; voices are made with a Base checkpoint")
    samples = read_clip(clip, config.codec.sample_rate)
    seconds = len(samples) / config.codec.sample_rate
    if text is not None:
        text = text.strip()
        if not is_speakable(text):
            raise RequestRefused("text: holds nothing that is said; give the clip's exact words, or leave text out")
        if len(text) > MOST_CHARS_PER_S * seconds:
            raise RequestRefused(
                f"text: {len(text)} characters cannot be said in a clip of {seconds:.1f} s; give the words of this clip and no others"
            )
    speaker, encoder = load_encoders(folder)
    with torch.inference_mode():
        vector = speaker(mel_spectrogram(samples, speaker.config.sample_rate, speaker.config.mels))
        codes = None if text is None else encoder(samples)
    card = VoiceCard(
        name=name,
        text=text,
        width=len(vector),
        groups=config.talker.groups,
        codebook=config.predictor.vocab,
        seconds=round(seconds, 2),
        model=checkpoint_name(folder),
    )
    store.save(card, vector, codes)
    return card


def read_clip(path: Path, sample_rate: int) -> Tensor:
    """The clip's samples [N] in [-1, 1], mono at `sample_rate`, from any audio FFmpeg knows. Raises RequestRefused."""
    pieces: list[np.ndarray] = []
    try:
        with av.open(path) as container:
            if not container.streams.audio:
                raise RequestRefused(f"clip: {path} holds no audio; {GOOD_LENGTH}")
            # Channels stay apart until here: FFmpeg's own downmix is louder than their mean.
            resampler = av.AudioResampler(format="fltp", rate=sample_rate)
            for frame in chain(container.decode(audio=0), (None,)):
                pieces += [part.to_ndarray().mean(0) for part in resampler.resample(frame)]
                if sum(len(piece) for piece in pieces) > LONGEST_S * sample_rate:
                    break
    except FileNotFoundError:
        raise RequestRefused(f"clip: {path} does not exist; check the path and {GOOD_LENGTH}") from None
    except (av.FFmpegError, OSError) as error:
        raise RequestRefused(f"clip: {path} cannot be read as audio ({getattr(error, 'strerror', None) or error}); {GOOD_LENGTH}") from None
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    seconds = len(samples) / sample_rate
    if seconds > LONGEST_S:
        raise RequestRefused(f"clip: {path} is longer than {LONGEST_S:g} s; {GOOD_LENGTH}")
    if seconds < SHORTEST_S:
        raise RequestRefused(f"clip: {path} is {seconds:.2f} s long, too short to learn a voice from; {GOOD_LENGTH}")
    if not np.isfinite(samples).all():
        raise RequestRefused(f"clip: {path} holds samples that are no numbers; record or convert it again")
    tenths = samples[: len(samples) // (sample_rate // 10) * (sample_rate // 10)].reshape(-1, sample_rate // 10)
    loudest = float(np.sqrt(np.square(tenths).mean(1).max()))
    if loudest < 10 ** (SILENCE_DBFS / 20):
        raise RequestRefused(f"clip: {path} is silent (its loudest tenth of a second lies below {SILENCE_DBFS:g} dBFS); {GOOD_LENGTH}")
    return torch.from_numpy(samples.astype(np.float32))
