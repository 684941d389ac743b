"""Extent: how much text one utterance may hold, so that its speech ends before its slot is full. Pure.

The Talker eats text several times faster than it speaks, and what it has said of it cannot be told; so the end is planned
by the text alone, as it comes: at a sentence's end once half of the slot is taken, a little later at a comma, then at any word."""

from __future__ import annotations

import math
import unicodedata
from functools import lru_cache
from itertools import repeat

from engine.characters import NO_SPACES
from engine.guard import longest_s

# The share of its longest plausible time that even slow speech takes for a text: 0.13 s a letter. Usual English takes half of that,
# the embedded voice two thirds.
SLOW = 0.65
# Shares of the room from which on an utterance may end there.
SENTENCE_FROM, CLAUSE_FROM, WORD_FROM, ANYWHERE_FROM, IN_A_CHARACTER_FROM = 0.5, 0.8, 0.85, 1.0, 1.1
_SENTENCE_MARKS = ".!?…。！？\n"
_CLAUSE_MARKS = ",;:，、；：—"
_WIDE_MARKS = "。！？…，、；："
_FLAG_LETTERS = "".join(map(chr, range(0x1F1E6, 0x1F200)))
_CLOSING = "\"')]}”’»」』】）》"


class TextRoom:
    """Room for `room_s` seconds of speech, in which each text token takes a frame of `frame_s` at least. Feed it all the text in order."""

    def __init__(self, room_s: float, frame_s: float) -> None:
        self._room_s = room_s
        self._frame_s = frame_s
        self._taken_s = 0.0
        self._mark = self._last = ""
        self._spaced = False

    def end_in(self, text: str) -> int | None:
        """The index in `text` at which the utterance is to end; None if all of it belongs to it. An end always has text behind it."""
        taken_s = sum(map(_takes_s, text, repeat(self._frame_s)), self._taken_s)
        if taken_s < self._room_s * SENTENCE_FROM:
            # Far from an end: of what stands before the last character that says something nothing is remembered.
            said = next((index for index in range(len(text) - 1, -1, -1) if not text[index].isspace() and text[index] not in _CLOSING), 0)
            for char in text[said:]:
                self._note(char)
            self._taken_s = taken_s
            return None
        for index, char in enumerate(text):
            if self._taken_s >= self._room_s * SENTENCE_FROM and self._taken_s >= self._room_s * self._may_end_from(char):
                return index
            self._taken_s += _takes_s(char, self._frame_s)
            self._note(char)
        return None

    def _note(self, char: str) -> None:
        if char.isspace():
            self._spaced = True
            if char == "\n":
                self._mark = char
        elif char not in _CLOSING:
            self._mark, self._spaced = char, False
        self._last = char

    def _may_end_from(self, char: str) -> float:
        """The share of the room from which on the utterance may end before `char`."""
        if not self._last:
            return math.inf
        if char.isspace() or char in _CLOSING or char in _WIDE_MARKS:
            return ANYWHERE_FROM
        if self._spaced or self._mark in _WIDE_MARKS:
            if self._mark in _SENTENCE_MARKS:
                return SENTENCE_FROM
            if self._mark in _CLAUSE_MARKS:
                return CLAUSE_FROM
        if self._spaced or (NO_SPACES.match(char) and NO_SPACES.match(self._last)):
            return WORD_FROM
        # Not inside a character if it can be helped: marks, joiners and what they join, skin tones, the letters of a flag.
        joined = unicodedata.category(char) in ("Mn", "Mc", "Me", "Cf", "Sk") or unicodedata.category(self._last) == "Cf" or char in _FLAG_LETTERS
        return IN_A_CHARACTER_FROM if joined else ANYWHERE_FROM


@lru_cache(maxsize=4096)
def _takes_s(char: str, frame_s: float) -> float:
    """Seconds of the room: no tokenizer makes more tokens of a character than it has bytes."""
    return max(longest_s(char) * SLOW, len(char.encode()) * frame_s)
