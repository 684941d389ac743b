"""Characters: which of them can be said, which are only there for a screen or a machine. Pure."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

# Signs that are read by their names where they stand alone; a dash, a bracket or a picture is not.
_NAMED = "%&@§°+"
# Controls but for white space, and format characters (zero-width space, soft hyphen, byte order mark, direction marks, ...). The
# two joiners belong to the spelling of the scripts from Hebrew on and to emoji; behind other characters they are dirt as well.
_UNSAID = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0001]"
    "|(?<![\u0590-\u1dff\u2190-\ufffe\U00010000-\U0010ffff])[\u200c\u200d]"
)
# Letters of scripts written without spaces between words: Thai to Myanmar, Khmer, kana, bopomofo, Han.
NO_SPACES = re.compile(r"[\u0e00-\u109f\u1780-\u17ff\u3040-\u312f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
# Hangul vowels and finals compose with the character before them, as marks do.
_JOINING = re.compile(r"[\u1160-\u11ff]")


def is_speakable(text: str) -> bool:
    """Whether anything in the text could be said: a letter, a number, a currency sign or a sign with a name."""
    return any(char in _NAMED or (category := unicodedata.category(char))[0] in "LN" or category == "Sc" for char in text)


def spoken_form(text: str, before: str = "") -> tuple[str, list[int] | None]:
    """`text` as the tokenizer wants it: in NFC, without what is never said. Also where each of its characters ends in `text`, None
    where nothing changed. `before` is what the text follows."""
    context = before[-1:]
    unsaid = [match.start() - len(context) for match in _UNSAID.finditer(context + text) if match.start() >= len(context)]
    if not unsaid and unicodedata.is_normalized("NFC", text):
        return text, None
    dropped = set(unsaid)
    kept = [index for index in range(len(text)) if index not in dropped]
    # What is said up to the next character that is kept takes the unsaid ones behind it along.
    ends = [*kept[1:], len(text)]
    starts = [place for place, index in enumerate(kept) if not (place and _continues(text[index]))]
    form, places = "", []
    for first, end in pairwise([*starts, len(kept)]):
        composed = unicodedata.normalize("NFC", "".join(text[index] for index in kept[first:end]))
        form += composed
        # A character made of several ends where they do.
        places += [ends[min(first + number, end - 1)] for number in range(len(composed) - 1)] + [ends[end - 1]]
    return form, places


def _continues(char: str) -> bool:
    """Whether it may compose with the character before it."""
    return unicodedata.category(char)[0] == "M" or _JOINING.match(char) is not None
