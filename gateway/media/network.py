"""Network: how much less prompt than others a listener's packets may be made, by what its network is like. Pure.

In silence the RTP time of what is sent goes back (gateway.media.track), which to a browser looks like a packet that came late. It reckons with
that as with lateness of the network, and on a bad one would then hold more than it has in speech, and stretch the beginning."""

from __future__ import annotations

from collections import deque

MUCH_S, LITTLE_S = 0.049, 0.019
"""Packets may be less prompt than others by so much. A browser counts in 20 ms, looks at its clock every 10 ms, and so reckons with 60 ms
for the one, with 40 for the other, on a network that itself makes it hold 20."""
RISES_S = {MUCH_S: 0.06, LITTLE_S: 0.04}
"""So much more than for its network's sake it must have in speech before they are."""
FALLS_S = {MUCH_S: 0.02, LITTLE_S: 0.0}
"""With less than that they are not any more."""
ROUNDING_S = 0.005
PROOF = 20
"""Reports in a row, four seconds, that must say so before more is risked: a browser takes a bad network for a good one at first."""


def less_prompt(before_s: float, network_s: float, worst_s: float, speech_s: float) -> float:
    """How much less prompt packets may be made, after `before_s`, for one that holds `speech_s` in speech, and for its network's sake would hold
    `network_s`, in which is what was done to it; lately it was `worst_s`."""
    kept = (less_s for less_s in (MUCH_S, LITTLE_S) if less_s <= before_s and speech_s - network_s >= FALLS_S[less_s] - ROUNDING_S)
    proven = (less_s for less_s in (MUCH_S, LITTLE_S) if speech_s - worst_s >= RISES_S[less_s] - ROUNDING_S)
    return max(*kept, *proven, 0.0, 0.0)


class Network:
    """One listener's."""

    def __init__(self, speech_s: float) -> None:
        self.less_prompt_s = less_prompt(0.0, 0.02, 0.02, speech_s)
        """Packets may be less prompt than others by so much; 0: silence is to be sent like sound. As on a good network for whoever does not
        say what his is like."""
        self.bearable = True
        """It would hold no more for its network's sake than it does in speech, as far as it says."""
        self._speech_s = speech_s
        self._lately: deque[float] = deque(maxlen=PROOF)

    def report(self, network_s: float | None) -> None:
        """What the listener would hold for its network's sake; None: it does not say."""
        if network_s is None:
            return
        self.bearable = network_s <= self._speech_s + ROUNDING_S
        before_s = self.less_prompt_s if self._lately else 0.0
        self._lately.append(network_s)
        worst_s = max(self._lately) if len(self._lately) == PROOF else float("inf")
        self.less_prompt_s = less_prompt(before_s, network_s, worst_s, self._speech_s)
