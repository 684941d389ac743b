"""Worlds by the thousand: nobody starves, live goes before files, our policy beats simpler ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.admission import FORECAST_GRACE_S
from engine.config import LATENCY
from engine.request import Utterance
from engine.scheduler import Launch, ReadyWork, Scheduler, Stage, StageCosts
from engine.simulate import POLICIES, Arrival, Durations, FirstCome, percentile, poisson, simulate
from tests.conftest import SOAK

MORE = max(1, SOAK)
"""So many times more worlds (`make soak`)."""
CONFIG = replace(LATENCY, buckets=(1, 2, 4, 8), slots=8)


def costs(scale: float = 1.0) -> StageCosts:
    """A device that makes speech about six times faster than it is heard, at `scale` 1."""
    made = StageCosts(CONFIG.buckets)
    made.record(Stage.PREFILL, 1, 1, scale * 0.010)
    for rows in CONFIG.buckets:
        made.record(Stage.TALKER, rows, 1, scale * (0.003 + 0.0003 * rows))
        made.record(Stage.PREDICTOR, rows, 1, scale * (0.006 + 0.0005 * rows))
        for frames in (1, 2, 4, 8):
            made.record(Stage.CODEC, rows, frames, scale * (0.003 + 0.001 * frames * rows))
    return made


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_s=st.floats(0.0, 4.0),
        frames=st.integers(1, 40),
        pace=st.sampled_from(["live", "live", "file"]),
        token_every_s=st.sampled_from([0.0, 0.0, 0.02, 0.2]),
        prefill=st.sampled_from([0, 0, 1, 40]),
    ),
    min_size=1,
    max_size=9,
)


class Watched(Scheduler):
    """The real scheduler, each launch looked at before it leaves."""

    def must_be_right(self, now_s: float, launch: Launch | None, work: list[ReadyWork]) -> None:
        """The anchor is whom design 3.5 names, at the work it needs next."""
        late = [item for item in work if item.utterance.has_sounded and item.due_s <= now_s]
        silent = [item for item in work if not item.utterance.has_sounded]
        near = [item for item in work if item.due_s < now_s + self.config.ahead_s]
        if late:
            allowed = [item for item in late if item.dry_at == min(other.dry_at for other in late)]
        elif silent:
            silent = [item for item in silent if item.utterance.live] or silent
            allowed = [item for item in silent if item.utterance.arrived_s == min(other.utterance.arrived_s for other in silent)]
            allowed = [item for item in allowed if item.stage == max(other.stage or 0 for other in allowed)]
        elif near:
            allowed = [item for item in near if item.due_s == min(other.due_s for other in near)]
        else:
            allowed = [item for item in work if not item.utterance.live]
        if launch is None:
            assert not allowed, "there is work, and nobody is served"
        else:
            assert any((item.utterance, item.stage, item.frames) == (launch.rows[0], launch.stage, launch.frames) for item in allowed)

    def pick(self, now_s: float, utterances: Sequence[Utterance], streams: int | None = None) -> Launch | None:
        # Before the pick, which learns from it how many rows are usual.
        work = self.survey(now_s, utterances)
        for u in utterances:
            u.work = None
        assert work == self.survey(now_s, utterances), "what was found before no longer holds"
        launch = super().pick(now_s, utterances, streams)
        self.must_be_right(now_s, launch, work)
        if launch is not None:
            assert 1 <= len(launch.rows) <= CONFIG.buckets[-1]
            assert len({id(u) for u in launch.rows}) == len(launch.rows)
            for u in launch.rows:
                if launch.stage is Stage.PREFILL:
                    assert launch.rows == [u] and u.prefill_left
                elif launch.stage is Stage.TALKER:
                    assert u.talker_ready
                elif launch.stage is Stage.PREDICTOR:
                    assert u.predictor_ready
                else:
                    assert 1 <= launch.frames <= u.undecoded
                far_ahead = u.live and u.has_sounded and u.playback.buffered_s(now_s) > self.config.ahead_s + 0.7
                assert not far_ahead, "a listener far ahead was served"
        return launch


@settings(max_examples=400 * MORE, deadline=None)
@given(ARRIVALS, st.sampled_from([0.3, 1.0, 3.0, 10.0]))
def test_in_any_world_everyone_is_spoken_to_the_end(arrivals: list[Arrival], scale: float) -> None:
    """Also on a device far slower than it seemed when they were admitted: late, but to the end, every frame once and in order."""
    run = simulate(Watched, CONFIG, costs(), arrivals, Durations(costs(scale)))
    assert len(run.outcomes) == len(arrivals)
    assert all(outcome.refused or (outcome.done_s is not None and outcome.ttfa_s is not None) for outcome in run.outcomes)
    if scale <= 1.0 and len(arrivals) <= CONFIG.slots:
        assert not any(outcome.refused for outcome in run.outcomes)


@settings(max_examples=100 * MORE, deadline=None)
@given(st.lists(st.floats(0.0, 2.0), min_size=2, max_size=12))
@example([0.0] * 6)
def test_a_device_known_to_be_too_slow_refuses_rather_than_break_what_it_has_begun(at_s: list[float]) -> None:
    """A device that can keep some of them: who finds no room within the limit is refused, who was admitted hears no gap longer than
    a forecast can tell."""
    run = simulate(Scheduler, CONFIG, costs(3.0), [Arrival(at, 150) for at in at_s])
    assert sum(not outcome.refused for outcome in run.outcomes) >= 1
    assert all(outcome.refused or outcome.done_s is not None for outcome in run.outcomes)
    assert all(outcome.silent_s <= 2 * FORECAST_GRACE_S for outcome in run.outcomes)


def test_downloads_and_senders_who_pause_keep_no_newcomer_out() -> None:
    """They run dry for reasons of their own: the text of both comes a token every five seconds."""
    slow = [Arrival(0.0, 30, "file", token_every_s=5.0), Arrival(0.0, 30, token_every_s=5.0)]
    run = simulate(Scheduler, CONFIG, costs(), [*slow, Arrival(7.0, 10)])
    assert run.outcomes[2].ttfa_s is not None and run.outcomes[2].ttfa_s < 0.1


DOWNLOADS = st.lists(
    st.builds(Arrival, at_s=st.floats(0.0, 4.0), frames=st.sampled_from([40, 1000]), pace=st.just("file"), prefill=st.sampled_from([0, 3, 64])),
    min_size=1,
    max_size=CONFIG.slots + 2,
)


@settings(max_examples=100 * MORE, deadline=None)
@given(st.lists(st.floats(0.0, 4.0), min_size=1, max_size=2), DOWNLOADS)
@example([1.0], [Arrival(0.0, 1000, "file") for _ in range(8)])
@example([1.0], [Arrival(0.999, 20, "file", prefill=64)])
def test_downloads_delay_a_live_first_sound_by_two_quanta_at_most(at_s: list[float], downloads: list[Arrival]) -> None:
    """However many there are, however long their prompts, whether they have sounded or not."""
    live = [Arrival(at, 20) for at in at_s]
    prices = costs()
    quantum_s = max(prices.estimate(stage, rows, frames) for stage in Stage for rows in CONFIG.buckets for frames in CONFIG.chunk_frames)
    alone, together = simulate(Scheduler, CONFIG, prices, live), simulate(Scheduler, CONFIG, prices, [*live, *downloads])
    for pace in [outcome for outcome in together.outcomes if outcome.arrival.pace == "live"]:
        without = next(outcome for outcome in alone.outcomes if outcome.arrival == pace.arrival)
        assert pace.ttfa_s is not None and without.ttfa_s is not None
        assert pace.ttfa_s <= without.ttfa_s + 2 * quantum_s


@settings(max_examples=200 * MORE, deadline=None)
@given(ARRIVALS)
def test_a_device_with_room_leaves_no_gap(arrivals: list[Arrival]) -> None:
    """Eight streams need half of this device: every listener whose text is there hears an unbroken utterance."""
    run = simulate(Scheduler, CONFIG, costs(0.5), arrivals)
    for outcome in run.outcomes:
        if outcome.arrival.pace == "live" and outcome.arrival.token_every_s == 0.0:
            assert outcome.underruns == 0


def test_our_policy_sounds_sooner_than_first_come_and_breaks_no_more_than_any() -> None:
    runs = {name: simulate(policy, CONFIG, costs(2.0), poisson(0.8, 120.0, seed=3)) for name, policy in POLICIES.items()}
    ours = runs["vivavoce"]
    assert ours.ttfa_s(0.95) < 0.5 * runs["first come"].ttfa_s(0.95)
    assert all(ours.underrun_share < runs[name].underrun_share for name in ("round-robin", "first come"))
    # Earliest-deadline is as good at keeping sound unbroken: a few milliseconds in all are the price of quick first sounds.
    assert sum(outcome.silent_s for outcome in ours.outcomes) < 0.01


def test_first_come_lets_newcomers_wait() -> None:
    """The comparison can tell policies apart: behind a long utterance first-come is far slower."""
    arrivals = [Arrival(0.0, 300), Arrival(0.5, 10)]
    slow = costs(4.0)
    assert simulate(FirstCome, CONFIG, slow, arrivals).outcomes[1].ttfa_s > 2 * (simulate(Scheduler, CONFIG, slow, arrivals).outcomes[1].ttfa_s or 9)  # type: ignore[operator]


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.95) == 1.0
