"""The sentences that the voice learns from, as written text (the teacher reads digits, dates and titles by itself).

    python -m engine.voice.train.text WORDNET_DIR SOTU_DIR NAMES_JSON... --out train.txt.gz

WordNet 3.0 glosses and examples (WordNet licence), State of the Union addresses since 1900 and common first names
(CC0), and templates written here: conversation, assistants' answers, questions, names, numbers, dates, addresses.
Sentences of sentences_*.txt, which judge the voice, are left out.
"""

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from engine.voice.judge import read_sentences

WRITABLE = re.compile(r"^[A-Za-z0-9 ,.;:'?!$%&/()\"#@°€£+=–—-]+$")
HERE = Path(__file__).parent

_fields = dict(line.split(": ", 1) for line in (HERE / "vocabulary.txt").read_text().splitlines() if not line.startswith("#"))
MONTHS, DAYS, PLACES, SURNAMES, STREETS, STREET_KINDS, THINGS, ADJECTIVES, VERBS, ADVERBS, PEOPLE, TOPICS, UNITS, CODES, ABBREVIATIONS = (
    _fields[name].split("; ")
    for name in [
        "MONTHS",
        "DAYS",
        "PLACES",
        "SURNAMES",
        "STREETS",
        "STREET_KINDS",
        "THINGS",
        "ADJECTIVES",
        "VERBS",
        "ADVERBS",
        "PEOPLE",
        "TOPICS",
        "UNITS",
        "CODES",
        "ABBREVIATIONS",
    ]
)
TEMPLATES = (HERE / "templates.txt").read_text().splitlines()
INNER = ["I want to {v} the {t}", "It is {a}", "We will {v} it {w}", "You are {a}", "That was a {a} {t}"]
QUESTIONS = ["Where is the {t}?", "Can we {v} it?", "Is it {a}?", "Who are you?", "What was that?"]


def number(r: random.Random) -> str:
    k = r.random()
    if k < 0.35:
        return str(r.randint(0, 20))
    if k < 0.65:
        return str(r.randint(21, 100))
    if k < 0.8:
        return str(r.randint(101, 999))
    return r.choice(
        [
            f"{r.randint(1, 99)},{r.randint(0, 999):03d}",
            str(r.randint(1, 99) * 100),
            str(r.randint(1000, 9999)),
            f"{r.randint(0, 99)}.{r.randint(0, 9)}",
            f"{r.randint(100, 999)},{r.randint(0, 999):03d}",
            f"{r.randint(2, 90)} million",
            f"{r.randint(1, 9)}.{r.randint(1, 9)} billion",
            f"{r.randint(1, 9)},{r.randint(0, 999):03d},{r.randint(0, 999):03d}",
        ]
    )


def ordinal(n: int) -> str:
    return f"{n}{'th' if 10 <= n % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def date(r: random.Random) -> str:
    m, d, y = r.choice(MONTHS), r.randint(1, 28), r.choice([r.randint(1900, 2035), r.randint(1500, 1899), r.randint(2000, 2030)])
    return r.choice(
        [
            f"{m} {d}",
            f"{m} {ordinal(d)}",
            f"{m} {d}, {y}",
            f"the {ordinal(d)} of {m}",
            f"{r.choice(DAYS)}, {m} {ordinal(d)}",
            f"{m} {y}",
            str(y),
            f"{m} {ordinal(d)}, {y}",
            f"{r.choice(DAYS)}",
            f"{m[:3]}. {d}",
            f"{r.randint(1, 12)}/{d}/{y}",
            f"{d} {m} {y}",
        ]
    )


def clock(r: random.Random) -> str:
    h, m = r.randint(1, 12), r.choice([0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, r.randint(1, 59)])
    return r.choice(
        [
            f"{h} o'clock",
            f"{h}:{m:02d}",
            f"{h}:{m:02d}",
            f"{h}:{m:02d} pm",
            f"{h}:{m:02d} a.m.",
            f"{h} am",
            f"{h} p.m.",
            f"half past {h}",
            f"a quarter to {h}",
            "noon",
            "midnight",
            f"{h}:{m:02d} AM",
        ]
    )


def money(r: random.Random) -> str:
    return r.choice(
        [
            f"${r.randint(1, 99)}",
            f"${r.randint(1, 99)}.{r.randint(1, 99):02d}",
            f"${r.randint(1, 20)}00",
            f"{r.randint(2, 90)} dollars",
            f"${r.randint(1, 999)},{r.randint(0, 999):03d}",
            f"€{r.randint(2, 90)}",
            f"£{r.randint(2, 500)}",
            f"${r.randint(2, 90)} million",
            f"{r.randint(2, 99)} cents",
            f"${r.randint(100, 999)}",
        ]
    )


def phone(r: random.Random) -> str:
    return r.choice(
        [
            f"{r.randint(200, 999)}-{r.randint(0, 9999):04d}",
            f"{r.randint(200, 999)}-{r.randint(200, 999)}-{r.randint(0, 9999):04d}",
            " ".join(str(r.randint(0, 9)) for _ in range(r.randint(3, 7))),
        ]
    )


def address(r: random.Random) -> str:
    road = f"{r.randint(1, 999)} {r.choice(STREETS)} {r.choice(STREET_KINDS)}"
    return r.choice(
        [
            road,
            road,
            f"{road}, {r.choice(PLACES)}",
            f"{road}, apartment {r.randint(1, 40)}",
            f"{r.randint(1, 999)} {ordinal(r.randint(1, 99))} Street",
        ]
    )


def fill(template: str, r: random.Random, people: list[str]) -> str:
    """One template with its letters replaced: {n} first name, {s} surname, {c} clock, {d} date, {m} money, {N} number, ..."""
    makers = {
        "n": lambda: r.choice(people),
        "s": lambda: r.choice(SURNAMES),
        "c": lambda: clock(r),
        "d": lambda: date(r),
        "D": lambda: r.choice(DAYS),
        "m": lambda: money(r),
        "N": lambda: number(r),
        "k": lambda: str(r.randint(1, 12)),
        "p": lambda: r.choice(PLACES),
        "y": lambda: str(r.randint(1900, 2035)),
        "t": lambda: r.choice(THINGS),
        "a": lambda: r.choice(ADJECTIVES),
        "v": lambda: r.choice(VERBS),
        "w": lambda: r.choice(ADVERBS),
        "P": lambda: r.choice(PEOPLE),
        "A": lambda: address(r),
        "f": lambda: phone(r),
        "T": lambda: r.choice(TOPICS),
        "u": lambda: r.choice(UNITS),
        "C": lambda: r.choice(CODES),
        "L": lambda: r.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        "B": lambda: r.choice(ABBREVIATIONS),
        "o": lambda: ordinal(r.randint(1, 31)),
        "M": lambda: r.choice(MONTHS),
        "S": lambda: r.choice(STREETS),
        "I": lambda: fill(r.choice(INNER), r, people),
        "Q": lambda: fill(r.choice(QUESTIONS), r, people),
    }
    s = re.sub(r"\{(\w)\}", lambda m: makers[m.group(1)](), template)
    return s[0].upper() + s[1:]


def word_list(r: random.Random, words: list[str]) -> str:
    """Words without context: no language model can guess them, so sounds must come from letters."""
    w = [r.choice(words) for _ in range(r.randint(2, 5))]
    frame = r.choice(["The words are {}.", "He wrote {}.", "{}.", "She said {}.", "Read {} again.", "We saw {} there.", "{}?", "Do you mean {}?"])
    s = frame.format(", ".join(w[:-1]) + " and " + w[-1])
    return s[0].upper() + s[1:]


def tidy(s: str) -> str:
    s = s.replace("’", "'").replace("`", "'").replace("--", ", ").replace('"', "")
    s = re.sub(r"\([^)]*\)", " ", s)
    s = re.sub(r"\s+", " ", s)
    return re.sub(r"\s+([,.;:?!])", r"\1", s).strip(" ,;:-")


def wordnet(folder: Path) -> Iterator[tuple[bool, str]]:
    """(is an example sentence, text) from the data files' glosses."""
    for name in ("data.noun", "data.verb", "data.adj", "data.adv"):
        for line in (folder / name).read_text(encoding="latin-1").split("\n"):
            if line.startswith("  ") or " | " not in line:
                continue
            gloss = line.split(" | ", 1)[1].strip()
            for example in re.findall(r'"([^"]+)"', gloss):
                yield True, tidy(example)
            for definition in re.split(r";\s*(?=[^;]*$)?", re.sub(r'"[^"]*"', "", gloss)):
                if tidy(definition):
                    yield False, tidy(definition)


def addresses_to_congress(folder: Path) -> Iterator[str]:
    for f in sorted(folder.glob("*.txt")):
        if int(f.name[:4]) >= 1900:
            text = re.sub(r"\s+", " ", f.read_text(encoding="utf-8", errors="ignore"))
            yield from (tidy(s) for s in re.split(r"(?<=[.!?])\s+", text))


def build(wordnet_dir: Path, sotu_dir: Path, name_files: list[Path], seed: int = 7) -> list[str]:
    r = random.Random(seed)
    people = sorted({n for f in name_files for n in json.loads(f.read_text()) if n.isalpha() and 2 < len(n) < 11})
    rows: list[str] = []
    lemmas: set[str] = set()
    for is_example, s in wordnet(wordnet_dir):
        lemmas.update(w for w in re.findall(r"[a-z]+", s) if 3 <= len(w) <= 14)
        if 8 <= len(s) <= 180 and WRITABLE.match(s):
            if is_example or r.random() < 0.6:
                s = s[0].upper() + s[1:]
                s += "" if s[-1] in ".!?" else "."
            rows.append(s)
    rows += [s for s in addresses_to_congress(sotu_dir) if 15 <= len(s) <= 220 and WRITABLE.match(s)]
    words = sorted(lemmas)
    rows = list(dict.fromkeys(rows))
    rows += list(dict.fromkeys(fill(r.choice(TEMPLATES), r, people) for _ in tqdm(range(130_000), desc="templates", disable=None)))
    rows += [word_list(r, words) for _ in range(45_000)]
    r.shuffle(rows)
    pool = [s for s in rows if s[-1] in ".!?" and len(s) < 120]
    several = [" ".join(r.sample(pool, r.choice([2, 2, 3, 4]))) for _ in range(60_000)]
    rows += [s for s in several if len(s) <= 280]
    r.shuffle(rows)
    held_out = {sentence.text.lower() for path in HERE.glob("sentences_*.txt") for sentence in read_sentences(path)}
    return [s for s in rows if s.lower() not in held_out]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wordnet", type=Path)
    parser.add_argument("sotu", type=Path)
    parser.add_argument("names", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = build(args.wordnet, args.sotu, args.names)
    with gzip.GzipFile(args.out, "wb", mtime=0) as f:
        f.write("\n".join(rows).encode())
    print(f"{len(rows)} rows, {sum(map(len, rows)) / 1e6:.1f} M characters, about {sum(map(len, rows)) / 15 / 3600:.0f} h")


if __name__ == "__main__":
    main()
