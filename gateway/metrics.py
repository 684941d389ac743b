"""Metrics for Prometheus. Events are counted as they pass; what is a state is read when somebody asks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from engine import Stats
from gateway.events import Error, Playback, ServerEvent, UtteranceCancelled, UtteranceDone, UtteranceStarted
from gateway.pool import EnginePool
from gateway.sessions import Sessions

TTFA_BOUNDS_S = (0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128)


class Openings(Protocol):
    """Who counts what is open (gateway.limits.Callers)."""

    @property
    def open(self) -> int:
        """Sessions and requests open now."""


class Absent(Protocol):
    """Who counts the sessions that wait for their clients (gateway.api.owner.Owners)."""

    @property
    def waiting(self) -> int:
        """Sessions whose client has no socket just now."""


class Metrics:
    """One gateway's."""

    def __init__(self, sessions: Sessions, absent: Absent, openings: Openings, engines: EnginePool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(sessions, absent, openings, engines))
        self._ttfa = Histogram(
            "vivavoce_ttfa_seconds",
            "From when an utterance could first be spoken to when its first audio left",
            ["via"],
            buckets=TTFA_BOUNDS_S,
            registry=self._registry,
        )
        what = "Utterances that have ended, by reason; one cancelled when all of it had been sent, but not heard, counts as end and as cancelled"
        self._utterances = Counter("vivavoce_utterances", what, ["reason"], registry=self._registry)
        self._errors = Counter("vivavoce_errors", "Errors told to sessions, by code", ["code"], registry=self._registry)
        what = "Gaps in mid-speech that listeners have reported"
        self._heard_gaps = Counter("vivavoce_heard_underruns", what, registry=self._registry)
        self._concealed = Counter("vivavoce_concealed_seconds", "Sound that listeners had to make up in mid-speech", registry=self._registry)
        self._refusals = Counter("vivavoce_refusals", "Sessions and requests refused, by code", ["code"], registry=self._registry)

    def saw(self, event: ServerEvent, via: str) -> None:
        """An event on its way to a client that listens `via` websocket or webrtc; for what a listener reports see HeardGaps."""
        match event:
            case UtteranceStarted(ttfa_ms=ttfa_ms):
                self._ttfa.labels(via).observe(ttfa_ms / 1000)
            case UtteranceDone(reason=reason):
                self._utterances.labels(reason).inc()
            case UtteranceCancelled():
                self._utterances.labels("cancelled").inc()
            case Error(code=code):
                self._errors.labels(code).inc()

    def gap(self, more_s: float, *, new: bool) -> None:
        """A listener has made up `more_s` of sound in mid-speech; `new`: this gap had not begun before."""
        self._concealed.inc(more_s)
        if new:
            self._heard_gaps.inc()

    def spoke(self, ttfa_s: float) -> None:
        """An HTTP speech request's first audio is there."""
        self._ttfa.labels("http").observe(ttfa_s)

    def refused(self, code: str) -> None:
        """A session or request was turned away."""
        self._refusals.labels(code).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All of it in the format that `accept` asks for, and that format's content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class HeardGaps:
    """What one session's listeners have missed, from their reports."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._concealed_ms = 0
        self._in_gap = False

    def saw(self, playback: Playback) -> None:
        """The next report. A new listener counts from zero."""
        more_ms = playback.concealed_ms - self._concealed_ms if playback.concealed_ms >= self._concealed_ms else playback.concealed_ms
        self._concealed_ms = playback.concealed_ms
        if more_ms:
            self._metrics.gap(more_ms / 1000, new=not self._in_gap)
        # A gap that lasts over several reports is one.
        self._in_gap = more_ms > 0


class _State(Collector):
    def __init__(self, sessions: Sessions, absent: Absent, openings: Openings, engines: EnginePool) -> None:
        self._sessions = sessions
        self._absent = absent
        self._openings = openings
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        sessions, engines = self._sessions, self._engines
        yield GaugeMetricFamily("vivavoce_sessions", "Sessions open now", value=sessions.count)
        what = "Sessions, of those, whose client's socket has broken and that wait for it"
        yield GaugeMetricFamily("vivavoce_sessions_waiting", what, value=self._absent.waiting)
        yield GaugeMetricFamily("vivavoce_open", "Sessions and speech requests open now", value=self._openings.open)
        yield GaugeMetricFamily("vivavoce_listeners", "WebRTC listeners attached now", value=sessions.listeners)
        gaps = CounterMetricFamily("vivavoce_underruns", "Times a WebRTC listener ran dry in mid-utterance, by who was late", labels=["late"])
        gaps.add_metric(["engine"], sessions.underruns)
        gaps.add_metric(["gateway"], sessions.stalls)
        yield gaps
        yield GaugeMetricFamily("vivavoce_engine_up", "Whether the engine answers", value=engines.unready is None)
        yield CounterMetricFamily("vivavoce_engine_restarts", "Times an engine was lost", value=engines.restarts)
        if (stats := engines.stats) is not None:
            yield from _of_engine(stats)


def _of_engine(stats: Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily("vivavoce_engine_slots", "Utterances the engine can speak at once", value=stats.slots)
    yield GaugeMetricFamily("vivavoce_engine_slots_used", "Utterances it is speaking", value=stats.slots_used)
    yield GaugeMetricFamily("vivavoce_engine_queue", "Utterances that wait for text or for a slot", value=stats.waiting)
    what = "Seconds before a listener would have run dry at which its next chunk was ready; negative: after"
    slack = HistogramMetricFamily("vivavoce_engine_slack_seconds", what)
    bounds = [*(str(bound) for bound in stats.slack_bounds), "+Inf"]
    slack.add_metric([], list(zip(bounds, itertools.accumulate(stats.slack_counts), strict=True)), stats.slack_sum)
    yield slack
    batch = HistogramMetricFamily("vivavoce_engine_batch_rows", "Rows of a launch", labels=["stage"])
    busy = CounterMetricFamily("vivavoce_engine_stage_seconds", "Time spent in launches", labels=["stage"])
    for stage in stats.stages:
        sizes = stage.sizes.items()
        buckets = [(str(bound), sum(count for rows, count in sizes if rows <= bound)) for bound in BATCH_BOUNDS]
        buckets.append(("+Inf", sum(count for _, count in sizes)))
        batch.add_metric([stage.stage], buckets, sum(rows * count for rows, count in sizes))
        busy.add_metric([stage.stage], stage.seconds)
    yield batch
    yield busy
    yield CounterMetricFamily(
        "vivavoce_engine_host_seconds", "Time the engine's own thread took for all launches, beside the device", value=stats.host_seconds
    )
    cost = GaugeMetricFamily("vivavoce_engine_launch_cost_seconds", "What a launch takes at present", labels=["stage", "rows", "frames"])
    for known in stats.costs:
        cost.add_metric([known.stage, str(known.rows), str(known.frames)], known.seconds)
    yield cost
