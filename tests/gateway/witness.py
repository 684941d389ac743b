"""Whether this machine has stood still meanwhile: then what was measured of real time says nothing."""

from __future__ import annotations

import threading
import time

EVERY_S = 0.005
STOOD_S = 0.02
"""A packet."""


class Witness:
    """`with Witness() as witness:` a thread that does nothing but wake every 5 ms; `most_s` is how late it was at most.

    It does not wait for the event loop, so a gateway that holds that up is not excused."""

    def __init__(self) -> None:
        self.most_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._over.wait(EVERY_S):
            now_s = time.monotonic()
            self.most_s = max(self.most_s, now_s - before_s - EVERY_S)
            before_s = now_s
        # It may have stood still in the last of them, too.
        self.most_s = max(self.most_s, time.monotonic() - before_s - EVERY_S)
