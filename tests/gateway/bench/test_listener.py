"""What a listener hears, from arrivals given by hand; and the sums over many."""

from __future__ import annotations

import itertools
import math
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bench.listener import Listener
from gateway.bench.load import Health, poisson
from gateway.bench.outcome import Outcome, Spread, Summary, percentile
from gateway.bench.sentences import sentences
from tests.gateway.bench.scripted import RATE, tone

SILENCE = -100.0


def listen(*arrivals: tuple[float, bytes]) -> Listener:
    listener = Listener(RATE)
    for at_s, pcm in arrivals:
        listener.hear(pcm, at_s)
    return listener


def test_nothing() -> None:
    listener = listen((1.0, b""))
    assert listener.first_s is None and listener.audible_s is None and listener.audio_s == 0.0


def test_sound_that_comes_in_time_never_runs_dry() -> None:
    listener = listen((1.0, tone(0.08)), (1.08, tone(0.08)), (1.10, tone(0.5)), (1.65, tone(0.1)))
    assert (listener.first_s, listener.audible_s, listener.underruns, listener.gap_s) == (1.0, 1.0, 0, 0.0)
    assert listener.audio_s == pytest.approx(0.76) and listener.dry_s == pytest.approx(1.76)


def test_each_time_the_sound_stops_is_an_underrun_and_playing_goes_on_from_there() -> None:
    listener = listen((1.0, tone(0.1)), (1.15, tone(0.1)), (1.25, tone(0.1)), (1.5, tone(0.1)))
    assert listener.underruns == 2 and listener.gap_s == pytest.approx(0.05 + 0.15)
    assert listener.dry_s == pytest.approx(1.6)


def test_silence_is_no_first_sound_and_counts_as_lead() -> None:
    listener = listen((1.0, tone(0.08, SILENCE)), (1.2, tone(0.08)))
    assert (listener.first_s, listener.audible_s) == (1.0, 1.2)
    # The window that begins half in the silence is loud enough already.
    assert listener.lead_s == pytest.approx(0.07)


@pytest.mark.parametrize(("dbfs", "heard"), [(-46.0, False), (-44.0, True)])
def test_the_level_is_minus_45_dbfs(dbfs: float, heard: bool) -> None:
    assert (listen((0.0, tone(0.2, dbfs))).audible_s is not None) == heard


def test_one_loud_window_is_a_click() -> None:
    # At the very beginning, where a sound of 5 ms lies in one window only.
    assert listen((0.0, tone(0.005) + tone(0.3, SILENCE))).audible_s is None
    assert listen((0.0, tone(0.005) + tone(0.3, SILENCE)), (0.5, tone(0.1))).audible_s == 0.5


def test_two_windows_need_thirty_milliseconds_of_sound() -> None:
    listener = listen((0.0, tone(0.029)), (0.5, tone(0.001)))
    assert listener.audible_s == 0.5


@given(cuts=st.lists(st.integers(1, 3000), max_size=12))
def test_how_the_bytes_are_cut_changes_nothing(cuts: list[int]) -> None:
    pcm, listener = tone(0.05, SILENCE) + tone(0.1), Listener(RATE)
    for cut in cuts:
        listener.hear(pcm[:cut], 1.0)
        pcm = pcm[cut:]
    listener.hear(pcm, 1.0)
    assert listener.underruns == 0 and listener.audio_s == pytest.approx(0.15)
    assert listener.audible_s == 1.0 and listener.lead_s == pytest.approx(0.04)


def outcome(number: int, **fields: object) -> Outcome:
    return Outcome(number, "x" * 50, 0.0, float(number), **({"status": "ok", "audio_s": 4.0, "took_s": 2.0} | fields))  # type: ignore[arg-type]


def test_a_summary_counts_what_went_wrong() -> None:
    outcomes = [outcome(n, first_byte_s=0.01 * (n + 1), audible_s=0.02 * (n + 1)) for n in range(10)]
    outcomes += [outcome(10, status="refused", audio_s=0.0), outcome(11, status="failed", audio_s=1.0), outcome(12, underruns=2, gap_s=0.3)]
    summary = Summary.of(outcomes)
    assert (summary.requests, summary.ok, summary.refused, summary.failed, summary.underrun, summary.clean) == (13, 11, 1, 1, 1, False)
    assert summary.first_byte_ms.p50 == pytest.approx(50) and summary.audible_ms.most == pytest.approx(200)
    assert summary.gap_ms.most == pytest.approx(300)
    assert summary.real_time == pytest.approx((11 * 4 + 1) / 14) and summary.chars_per_s == pytest.approx(11 * 50 / 14)


def test_one_in_a_thousand_may_go_wrong_in_a_clean_run() -> None:
    assert Summary.of([outcome(n, underruns=int(n == 5)) for n in range(1000)]).clean
    assert not Summary.of([outcome(n, underruns=int(n == 5)) for n in range(999)]).clean


def test_percentiles_of_few_take_the_worst() -> None:
    assert percentile([1.0, 2.0, 3.0], 0.95) == 3.0 and percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert math.isnan(Spread.of([None]).p50)


def test_arrivals_are_poisson_and_the_same_for_a_seed() -> None:
    requests = poisson(10.0, 200.0, ["a", "b", "c"], 7)
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.09 < mean < 0.11 and 0.9 < deviation / mean < 1.1
    assert requests == poisson(10.0, 200.0, ["a", "b", "c"], 7) != poisson(10.0, 200.0, ["a", "b", "c"], 8)
    assert [request.text for request in requests[:4]] == ["a", "b", "c", "a"]


def test_the_sentences_are_what_figures_were_measured_with() -> None:
    lengths = [len(sentence) for sentence in sentences()]
    assert len(set(sentences())) == 500 and min(lengths) >= 30 and max(lengths) <= 120
    assert 59.5 < sum(lengths) / 500 < 60.5
    # Another text is another benchmark: docs/measurements would have to be measured anew.
    assert zlib.crc32("\n".join(sentences()).encode()) == 1974206597


@pytest.mark.parametrize(
    ("late", "lag", "most", "core", "was"),
    [(1, 1, 20, 0.5, False), (9, 1, 20, 0.5, True), (1, 9, 20, 0.5, True), (1, 1, 90, 0.5, True), (1, 1, 20, 0.95, True)],
)
def test_a_client_is_late_when_it_sends_or_looks_late_or_stands_still_or_has_no_core_left(
    late: float, lag: float, most: float, core: float, was: bool
) -> None:
    assert Health(Spread(0, 0, late, late), Spread(0, 0, lag, most), core).was_late == was
