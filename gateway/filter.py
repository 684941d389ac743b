"""Text filters: between what is written and what is said. `ReadsAhead` is what a filter needs that decides character by character and
must not depend on how its text was cut: it gives back at once what is decided, and holds back what is not. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from gateway.symbols import in_word, unspaced

HOLD = 48
"""Fewer characters than this are held back at any time."""


class Cleaned(NamedTuple):
    """Text to be said, and for each of its characters the position of the one it comes from, counted from the first ever fed."""

    text: str
    at: list[int]


class TextFilter(Protocol):
    """Stands between what is written and what is said."""

    decided: int
    """Characters fed whose part is known; those after it are held back."""

    def feed(self, text: str) -> Cleaned:
        """More text; returns what can be said now."""

    def flush(self) -> Cleaned:
        """Give back what is held, as if the text ended here. It may go on: within a code fence it still is within it, and in mid-line in
        mid-line."""


class Verbatim:
    """The filter that changes nothing."""

    def __init__(self) -> None:
        self.decided = 0

    def feed(self, text: str) -> Cleaned:
        """See TextFilter."""
        start = self.decided
        self.decided += len(text)
        return Cleaned(text, list(range(start, self.decided)))

    def flush(self) -> Cleaned:
        """See TextFilter."""
        return Cleaned("", [])


class _Wait(Exception):
    """The next character decides, and is not there yet."""


class ReadsAhead(ABC):
    """A TextFilter made of steps. Each is called with the rest of the text at `_held[_i]` and must leave out or give back some of
    it, or be another the next time. It reads ahead with `_peek` first and changes something only then: `_Wait` leaves all as it was."""

    def __init__(self) -> None:
        self.decided = 0
        self._held = ""
        self._i = 0
        self._final = False
        self._text: list[str] = []
        self._at: list[int] = []
        self._before = ""
        """The character before this one, as written."""
        self._said = ""
        """The last character given back."""
        self._removed = False
        """Something was left out since."""
        self._gap: int | None = None
        """Where something that parts words was left out since."""
        self._cell: int | None = None
        """Where a comma is to be said before anything else."""

    @abstractmethod
    def _next(self) -> None:
        """Do one step."""

    def feed(self, text: str) -> Cleaned:
        """See TextFilter."""
        self._held += text
        return self._advance(final=False)

    def flush(self) -> Cleaned:
        """See TextFilter."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> Cleaned:
        self._final = final
        try:
            while self._i < len(self._held):
                self._next()
        except _Wait:
            pass
        self._held = self._held[self._i :]
        self._i = 0
        cleaned = Cleaned("".join(self._text), self._at)
        self._text, self._at = [], []
        return cleaned

    # Reading ahead

    def _peek(self, k: int) -> str:
        """The character `k` places on; "" past the end, which is also where this step may not look."""
        if k >= HOLD:
            return ""
        if self._i + k < len(self._held):
            return self._held[self._i + k]
        if self._final:
            return ""
        raise _Wait

    def _run(self, char: str) -> int:
        """How many of `char` stand here."""
        n = 1
        while self._peek(n) == char:
            n += 1
        return n

    def _past(self, chars: str, k: int) -> int:
        """The first place from `k` on that holds none of `chars`."""
        while (char := self._peek(k)) and char in chars:
            k += 1
        return k

    def _starts(self, word: str, k: int = 0) -> bool:
        return all(self._peek(k + j).lower() == char for j, char in enumerate(word))

    # Leaving out and giving back

    def _drop(self, n: int, *, gap: bool = False) -> None:
        """Leave out `n` characters."""
        if gap and self._gap is None:
            self._gap = self.decided
        self._removed = True
        self._pass(n)

    def _pass(self, n: int) -> None:
        self._before = self._held[self._i + n - 1]
        self._i += n
        self.decided += n

    def _say(self, n: int, text: str | None = None) -> None:
        """Give back the next `n` characters, or `text` in their place."""
        text = self._held[self._i : self._i + n] if text is None else text
        parts = in_word(self._said) and in_word(text[0]) and not (unspaced(self._said) and unspaced(text[0]))
        if self._cell is not None:
            self._put(", " if self._said.strip() else "", self._cell, 1)
        elif self._gap is not None and parts:
            self._put(" ", self._gap, 1)
        self._put(text, self.decided, n)
        self._removed, self._gap, self._cell = False, None, None
        self._pass(n)

    def _put(self, text: str, at: int, n: int) -> None:
        if text:
            self._text.append(text)
            self._at += range(at, at + n) if len(text) == n else [at + min(j, n - 1) for j in range(len(text))]
            self._said = text[-1]
