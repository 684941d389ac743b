"""Script: one utterance's text twice, as it was written and as it is said, and which part of the one is which of the other. Pure.

The engine and the estimates of what was heard count characters of what is said; clients count those of what they wrote."""

from __future__ import annotations

from gateway.filter import Cleaned, TextFilter


class Script:
    """Grows until it is finished. Several scripts may share a filter one after another, where a text goes on in the next utterance."""

    def __init__(self, text_filter: TextFilter) -> None:
        self.written = ""
        self.said = ""
        self.finished = False
        self._filter = text_filter
        self._base = text_filter.decided
        self._from: list[int] = []
        """Where in `written` each character of `said` comes from."""

    def append(self, text: str) -> str:
        """More is written; returns what is said of it now."""
        self.written += text
        return self._add(self._filter.feed(text))

    def finish(self) -> str:
        """It is written to its end; returns what was held back."""
        self.finished = True
        return self._add(self._filter.flush())

    def written_until(self, said: int) -> int:
        """How many characters of `written` the first `said` characters of `said` are, with the markup behind them."""
        if said <= 0:
            return 0
        if said < len(self.said):
            return self._from[said]
        return len(self.written) if self.finished else min(self._filter.decided - self._base, len(self.written))

    def split(self, said: int) -> Script:
        """Leave off behind the first `said` characters of `said`; returns the rest."""
        cut = self.written_until(said)
        rest = Script(self._filter)
        rest.written, rest.said, rest.finished = self.written[cut:], self.said[said:], self.finished
        rest._base = self._base + cut
        rest._from = [position - cut for position in self._from[said:]]
        self.written, self.said, self.finished = self.written[:cut], self.said[:said], True
        del self._from[said:]
        return rest

    def _add(self, cleaned: Cleaned) -> str:
        self.said += cleaned.text
        self._from += [position - self._base for position in cleaned.at]
        return cleaned.text
