"""TextRate: how fast a session's sender writes. Pure; the engine holds an utterance back for it (design 3.2a)."""

from __future__ import annotations

PAUSE_S = 1.0
WINDOW_S = 4.0
KNOWN_AFTER_S = 0.25


class TextRate:
    """Characters a second while the sender is writing; pauses of a second and more do not count."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._elapsed_s = 0.0
        self._chars = 0.0

    def append(self, chars: int, now_s: float) -> None:
        """Note that `chars` characters arrived."""
        if self._last_s is not None and now_s - self._last_s < PAUSE_S:
            self._elapsed_s += now_s - self._last_s
            self._chars += chars
            if self._elapsed_s > WINDOW_S:
                # Halving both forgets the past without a list of it.
                self._elapsed_s /= 2
                self._chars /= 2
        self._last_s = now_s

    @property
    def chars_per_s(self) -> float | None:
        """The rate, None until a quarter of a second of writing has been seen."""
        return self._chars / self._elapsed_s if self._elapsed_s >= KNOWN_AFTER_S else None
