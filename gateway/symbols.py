"""Kinds of characters, as far as speech cares. Pure."""

from __future__ import annotations

import re
import unicodedata

# Pictures, by blocks; those with a name one would say (arrows, suits' digits, musical signs, circled numbers) stay.
_EMOJI = re.compile(
    "[\u231a\u231b\u2328\u23cf\u23e9-\u23f3\u23f8-\u23fa\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u266c\u2670-\u2775\u2794-\u27bf"
    "\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\U0001f000-\U0001fbff]"
)
# Marks that only choose how the character before them is drawn.
_DRESS = re.compile("[\ufe00-\ufe0f\u20e3\U000e0100-\U000e01ef]")
# Scripts in which a zero-width joiner or non-joiner is spelling: Arabic to Mongolian, and their extensions.
_JOINING = re.compile("[\u0600-\u1cff\ua840-\uabff]")
_UNSPACED = re.compile("[\u0e00-\u0fff\u1780-\u17ff\u2e80-\ud7ff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")
_JOINERS = "\u200c\u200d"
_NOTHING = "\ufffc\ufffd\ufffe\uffff"


def in_word(char: str) -> bool:
    """Part of a word: a letter, a digit or a mark on one."""
    return bool(char) and (char.isalnum() or unicodedata.category(char)[0] == "M")


def unspaced(char: str) -> bool:
    """Of a script that has words without spaces between, or particles joined to them: Thai, Khmer, Han, kana, Hangul."""
    return _UNSPACED.match(char) is not None


def is_emoji(char: str) -> bool:
    """A picture, or a part of one."""
    return _EMOJI.match(char) is not None


def is_text(char: str, before: str) -> bool:
    """Not an instruction to a screen: control, format and private characters, and marks of dress. A joiner is spelling in some
    scripts; which, the character `before` it tells."""
    if char in _JOINERS:
        return _JOINING.match(before) is not None and in_word(before)
    return not (unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co") or _DRESS.match(char) or char in _NOTHING)
