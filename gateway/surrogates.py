"""Halves: text whose characters may come in halves. Pure.

JSON can write a character beyond U+FFFF as a pair of escapes, and a client that cuts its text by UTF-16 units sends them in two events."""

from __future__ import annotations

import re

_HALF = re.compile("[\ud800-\udfff]")


class Halves:
    """Of one text, event by event."""

    def __init__(self) -> None:
        self._first = ""

    def join(self, text: str) -> tuple[str, str]:
        """The whole characters of `text`, the first with its half from before; a first half at the end waits for its other half.
        Also the half, if any, that was left out because its other half is not beside it."""
        text = (self._first + text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        self._first = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        text = text[: len(text) - len(self._first)]
        left_out = _HALF.search(text)
        return _HALF.sub("", text), left_out[0] if left_out else ""

    def drop(self) -> str:
        """The text ends here: the half that was waiting, if any."""
        half, self._first = self._first, ""
        return half
