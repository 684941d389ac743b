"""Outcome: what became of one request; Summary: of many. Times are seconds unless their names say ms. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from gateway.bench.listener import Listener

CLEAN = 0.001
"""The share of requests that may go wrong in a run that is called clean."""


class Outcome(msgspec.Struct):
    """`planned_s` and `sent_s` count from the beginning of the run, everything else from the sending."""

    number: int
    text: str
    planned_s: float
    sent_s: float
    status: Literal["ok", "refused", "failed"] = "failed"
    why: str = ""
    first_byte_s: float | None = None
    audible_s: float | None = None
    lead_s: float = 0.0
    underruns: int = 0
    gap_s: float = 0.0
    audio_s: float = 0.0
    took_s: float = 0.0

    @property
    def clean(self) -> bool:
        return self.status == "ok" and self.underruns == 0

    def heard(self, listener: Listener, sent_s: float, ended_s: float) -> None:
        """Take what the listener knows; an answer without a sound in it has failed. `sent_s` and `ended_s` are by its clock."""
        self.took_s = ended_s - sent_s
        self.first_byte_s = None if listener.first_s is None else listener.first_s - sent_s
        self.audible_s = None if listener.audible_s is None else listener.audible_s - sent_s
        self.lead_s, self.underruns, self.gap_s, self.audio_s = listener.lead_s, listener.underruns, listener.gap_s, listener.audio_s
        if self.status == "ok" and self.audible_s is None:
            self.status, self.why = "failed", "the answer held no sound" if listener.bytes else "the answer was empty"


class Spread(msgspec.Struct):
    """Percentiles of something, in milliseconds; NaN of nothing."""

    p50: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Spread:
        known = sorted(value * 1000 for value in seconds if value is not None)
        return cls(*(percentile(known, share) for share in (0.50, 0.95, 0.99, 1.0)))


class Summary(msgspec.Struct):
    requests: int
    ok: int
    refused: int
    failed: int
    underrun: int
    """Requests with an underrun."""
    clean: bool
    first_byte_ms: Spread
    audible_ms: Spread
    lead_ms: Spread
    gap_ms: Spread
    """Of those with an underrun, its silence."""
    e2e_ms: Spread
    audio_s: float
    real_time: float
    """Seconds of audio received a second, from the first sending to the last byte."""
    chars_per_s: float
    """Characters spoken to their end a second."""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Summary:
        ok = [outcome for outcome in outcomes if outcome.status == "ok"]
        begin_s = min((outcome.sent_s for outcome in outcomes), default=0.0)
        span_s = max((outcome.sent_s + outcome.took_s for outcome in outcomes), default=0.0) - begin_s
        audio_s = sum(outcome.audio_s for outcome in outcomes)
        return cls(
            requests=len(outcomes),
            ok=len(ok),
            refused=sum(outcome.status == "refused" for outcome in outcomes),
            failed=sum(outcome.status == "failed" for outcome in outcomes),
            underrun=sum(outcome.underruns > 0 for outcome in outcomes),
            clean=sum(not outcome.clean for outcome in outcomes) <= CLEAN * len(outcomes),
            first_byte_ms=Spread.of(outcome.first_byte_s for outcome in ok),
            audible_ms=Spread.of(outcome.audible_s for outcome in ok),
            lead_ms=Spread.of(outcome.lead_s for outcome in ok),
            gap_ms=Spread.of(outcome.gap_s for outcome in outcomes if outcome.underruns),
            e2e_ms=Spread.of(outcome.took_s for outcome in ok),
            audio_s=audio_s,
            real_time=audio_s / span_s if span_s else 0.0,
            chars_per_s=sum(len(outcome.text) for outcome in ok) / span_s if span_s else 0.0,
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed: of few, the worst counts."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
