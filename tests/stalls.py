"""Did this machine stand still? Told by a clock of its own, that waits for no event loop and knows nothing of the gateway or the browser.

A shared virtual machine now and then stops for longer than a receiver's buffer lasts. What was heard meanwhile says nothing about
the product, so a test of sound asks here before it believes a bad recording, and a test in real time before it believes its clock."""

from __future__ import annotations

import threading
import time
from types import TracebackType

TICK_S = 0.005
LONGEST_S = 0.03
"""A receiver holds 70 to 80 ms. A thread that overslept this much was one of several that did, each after the other."""


class StallWatch:
    """A thread that sleeps in ticks and notes by how much it oversleeps."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        """By how much it overslept at most since `reset`."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def stalled(self) -> bool:
        """Whether the machine stood still since `reset`."""
        return self.longest_s > LONGEST_S

    def reset(self) -> None:
        """What was is forgotten."""
        self.longest_s = 0.0

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._stop.wait(TICK_S):
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - before_s - TICK_S)
            before_s = now_s
        # It may have stood still in the last of them, too.
        self.longest_s = max(self.longest_s, time.monotonic() - before_s - TICK_S)
