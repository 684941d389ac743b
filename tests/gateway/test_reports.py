"""Listeners who report how far they are, who pause, vanish, come back and lie; and what the engine is told. Real sockets, aiortc."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from gateway.config import GatewayConfig
from gateway.keys import DRAIN, PEERS, SESSIONS
from gateway.media.reserve import COLD_S, FADES_S
from tests.gateway.clients import PATIENCE_S, until
from tests.gateway.matching import align
from tests.gateway.stand_in import RATE, StandInEngine

TEXT = "The quick brown fox jumps over the lazy dog while seven wizards argue."
LONG = f"{TEXT} {TEXT}"
SHORT = "Just a few words."


@pytest.fixture
def config(config: GatewayConfig, request: pytest.FixtureRequest) -> GatewayConfig:
    """A listener that is away comes back in time, unless a test says otherwise."""
    return msgspec.structs.replace(config, **{"unheard_s": PATIENCE_S} | getattr(request, "param", {}))


def line(gateway, speaker):
    return gateway.app[SESSIONS].by_token(speaker.created["token"]).media


async def hears(listener, packets: int) -> None:
    """Until it has got so many packets of speech."""
    await until(lambda: len(listener.arrivals) >= packets)


async def stands(engine: StandInEngine) -> None:
    """Until the engine has been told that the listener does not play."""
    await until(lambda: not engine.utterances[0].playbacks[-1].playing)
    # What was on its way by then.
    await asyncio.sleep(0.1)


async def start(speaker, text: str = LONG) -> None:
    await speaker.send("text.append", text=text)
    await speaker.send("text.end")
    await speaker.event("utterance.started")


async def test_a_report_makes_playback_measured_and_its_end_an_estimate_again(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    await start(speaker)
    assert not (await speaker.event("playback"))["measured"]
    listener.play(behind=6)
    # A machine that stands still makes a listener run dry, or stand still.
    told = await speaker.event("playback")
    while not told["measured"] or not 60 <= told["buffered_ms"] <= 220:
        told = await speaker.event("playback")
    assert told["dry_in_ms"] >= told["buffered_ms"]
    await until(lambda: engine.utterances[0].playbacks[-1].measured and engine.utterances[0].playbacks[-1].playing)
    listener.stop_playing()
    await until(lambda: not engine.utterances[0].playbacks[-1].measured)
    while (await speaker.event("playback"))["measured"]:
        pass
    heard = engine.utterances[0].playbacks[-1].heard
    # Without reports the estimate runs on.
    await until(lambda: engine.utterances[0].playbacks[-1].heard > heard + 0.2 * RATE)


async def test_heard_is_what_the_listener_says(connect, listen) -> None:
    """It plays a second late: no estimate could know."""
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    listener.play(behind=50)
    await start(speaker)
    await until(lambda: listener.played_ms >= 800)
    least_ms, reported_s = listener.played_ms, listener.reported_s
    await speaker.send("cancel")
    cancelled = await speaker.event("utterance.cancelled")
    # From its last report on it is taken to play on, until the next one.
    most_ms = listener.played_ms + (time.monotonic() - reported_s) * 1000
    assert cancelled["measured"] and least_ms - 40 <= cancelled["heard_ms"] <= most_ms + 40


async def test_a_frozen_listener_is_sent_no_more_and_goes_on_where_it_was(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    listener.play()
    await start(speaker, TEXT)
    await hears(listener, 25)
    listener.freeze()
    await stands(engine)
    await until(lambda: line(gateway, speaker).paused)
    await asyncio.sleep(0.1)
    sent, heard = len(listener.arrivals), engine.utterances[0].playbacks[-1].heard
    await asyncio.sleep(0.3)
    assert len(listener.arrivals) == sent, "what a frozen receiver is sent overflows it"
    assert engine.utterances[0].playbacks[-1].heard == heard
    listener.play()
    await speaker.event("utterance.done")
    await speaker.say(SHORT)
    _, scores = align(listener.samples, bytes(engine.utterances[0].pcm))
    # aiortc makes up nothing for the pause, so there is none in what it decoded.
    assert min(scores) >= 0.9


@pytest.mark.real_time
async def test_a_paused_listener_hears_the_rest_when_it_plays_again(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    listener.play()
    await start(speaker, TEXT)
    await hears(listener, 32)
    listener.pause()
    await stands(engine)
    sent, silences = len(listener.arrivals), len(listener.silences)
    # The stream runs on, so that it need not begin anew.
    await until(lambda: len(listener.silences) > silences + 10)
    assert len(listener.arrivals) == sent
    heard = engine.utterances[0].playbacks[-1].heard
    assert not engine.utterances[0].playbacks[-1].playing and 0.3 * RATE < heard < 0.8 * RATE
    listened = len(listener.samples)
    listener.play()
    done = await speaker.event("utterance.done")
    assert (done["reason"], done["text"]) == ("end", TEXT) and len(engine.utterances) == 1
    await speaker.say(SHORT)
    lag, scores = align(listener.samples[listened:], bytes(engine.utterances[0].pcm)[2 * heard :])
    # The decoder needs some packets to get into its stride again.
    assert min(scores) >= 0.7 and sorted(scores)[len(scores) // 2] >= 0.9, "all that was not heard, whatever of it had been sent"
    assert lag < 0.5 * RATE


@pytest.mark.parametrize("config", [{"unheard_s": 1.0}], indirect=True)
async def test_a_long_pause_frees_the_engine(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    listener.play()
    await start(speaker)
    await hears(listener, 25)
    listener.pause()
    done = await speaker.event("utterance.done")
    assert done["reason"] == "unheard" and LONG.startswith(done["text"])
    await until(lambda: engine.utterances[0].cancelled)
    await asyncio.sleep(0.5)
    assert len(engine.utterances) == 1
    listener.play()
    rest = await speaker.event("utterance.done")
    assert rest["reason"] == "end" and done["text"] + rest["text"] == LONG


async def test_somebody_who_takes_over_hears_what_the_first_did_not(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    first = await listen(speaker, channel=True)
    first.play()
    await start(speaker, TEXT)
    await hears(first, 35)
    first.freeze()
    await stands(engine)
    told = engine.utterances[0].playbacks[-1].heard
    second = await listen(speaker, channel=True)
    second.play(behind=1)
    await speaker.event("utterance.done")
    made = len(engine.utterances[0].pcm) // 2
    again = second.sounded * 480 - (made - told)
    assert 0 <= again <= 0.05 * RATE, "nothing is lost or said twice, but for a packet's rest"


@pytest.mark.real_time
@pytest.mark.parametrize("config", [{"unheard_s": 1.0}], indirect=True)
async def test_a_listener_that_vanishes_frees_the_engine_and_a_later_one_hears_the_rest(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    first = await listen(speaker, channel=True)
    first.play()
    await start(speaker)
    await hears(first, 45)
    first.stop_playing()
    left_s = time.monotonic()
    await first.connection.close()
    done = await speaker.event("utterance.done")
    assert 0.95 < time.monotonic() - left_s < 1.6, "it might have come back"
    await until(lambda: engine.utterances[0].cancelled)
    assert len(engine.utterances) == 1
    assert done["reason"] == "unheard" and first.played_ms - 40 <= done["duration_ms"] <= len(first.arrivals) * 20 + 40
    assert LONG.startswith(done["text"]) and 0 < len(done["text"]) < 40
    await asyncio.sleep(0.5)
    assert len(engine.utterances) == 1, "nobody is there to hear the rest"
    second = await listen(speaker, channel=True)
    second.play()
    rest = await speaker.event("utterance.done")
    assert (rest["utterance"], rest["reason"]) == (2, "end")
    assert done["text"] + rest["text"] == LONG
    _, scores = align(second.samples[: 48000 * 8], bytes(engine.utterances[1].pcm)[: 48000 * 5])
    assert min(scores) >= 0.9


@pytest.mark.parametrize("config", [{"unheard_s": 1.0}], indirect=True)
async def test_a_drain_waits_for_who_listens_and_no_longer(connect, listen, gateway, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    listener.play()
    await start(speaker)
    await speaker.send("text.append", text=SHORT)
    await speaker.send("text.end")
    drain = asyncio.create_task(gateway.app[DRAIN].run(60.0))
    await asyncio.sleep(1.5)
    assert not drain.done()
    listener.stop_playing()
    await listener.connection.close()
    done = await speaker.event("utterance.done")
    assert (done["utterance"], done["reason"]) == (1, "unheard") and LONG.startswith(done["text"])
    assert (await speaker.event("error"))["code"] == "draining"
    await asyncio.wait_for(drain, PATIENCE_S)
    await until(lambda: engine.utterances[0].cancelled)
    assert len(engine.utterances) == 1


async def test_a_new_listener_within_the_grace_goes_on_without_the_engine_noticing(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    first = await listen(speaker, channel=True)
    first.play()
    await start(speaker)
    await hears(first, 45)
    await first.close()
    await asyncio.sleep(0.4)
    second = await listen(speaker, channel=True)
    second.play()
    done = await speaker.event("utterance.done")
    assert (done["utterance"], done["reason"], done["text"]) == (1, "end", LONG)
    assert len(engine.utterances) == 1 and not engine.utterances[0].cancelled
    missing = len(engine.utterances[0].pcm) // 2 / 480 - first.sounded - second.sounded
    assert -first.unplayed - 5 < missing <= 0, "nothing lost, and no more said twice than came behind its last report"


@pytest.mark.real_time
@pytest.mark.parametrize("config", [{"unheard_s": 1.0, "silent_s": 3.0}], indirect=True)
async def test_a_listener_that_is_cut_off_is_noticed(connect, listen, gateway, engine: StandInEngine) -> None:
    """As a killed tab: no word of farewell. Nothing comes from it any more, neither reports nor RTCP."""
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    listener.play()
    # The engine is three seconds ahead of what is heard as far as is known, and not to be through with it.
    await start(speaker, f"{LONG} {LONG}")
    await hears(listener, 45)
    listener.stop_playing()
    receiver = listener.connection.getReceivers()[0]
    receiver._RTCRtpReceiver__rtcp_task.cancel()
    done = await speaker.event("utterance.done")
    assert done["reason"] == "unheard" and 3.0 < time.monotonic() - listener.reported_s < 7.0
    assert done["duration_ms"] <= listener.played_ms + 400, "heard is what was reported, and not what was sent into the void"
    await until(lambda: engine.utterances[0].cancelled and not gateway.app[PEERS]._peers)


async def test_who_only_listens_may_not_speak(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    for kind, fields in (("text.append", {"text": "Let me in."}), ("cancel", {}), ("session.update", {"voice": "ryan"})):
        listener.send(kind, **fields)
        error = await listener.channel_event("error")
        assert error["code"] == "not_allowed" and "WebSocket" in error["message"]
    listener.send("ping")
    await listener.channel_event("pong")
    assert engine.utterances == []


async def test_the_owner_speaks_on_its_data_channel(connect, listen, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, token="resume", channel=True)
    for number in range(70):
        listener.send("text.append", text=f"w{number} ")
    listener.channel.send('{"type":"text.append","text":"\\ud83d"}')
    listener.channel.send('{"type":"text.append","text":"\\ude00 and the end."}')
    listener.send("text.end")
    await speaker.event("utterance.started")
    await listener.channel_event("utterance.started")
    wanted = " ".join(f"w{number}" for number in range(70))
    await until(lambda: engine.utterances[0].text.endswith("the end."))
    assert engine.utterances[0].text.startswith(wanted)
    listener.send("cancel")
    assert (await speaker.event("utterance.cancelled"))["utterance"] == 1
    for said, code in (('{"type":"text.append","text":5}', "invalid_event"), ("{", "malformed_event"), ('{"type":"sing"}', "unknown_event")):
        listener.channel.send(said)
        assert (await listener.channel_event("error"))["code"] == code
    listener.send("text.append", text="x" * 30_000)
    assert (await listener.channel_event("error"))["code"] == "text_too_long"


@pytest.mark.parametrize("config", [{"idle_s": 2.0}], indirect=True)
async def test_what_the_owner_says_there_keeps_the_session_from_being_idle(connect, listen, config: GatewayConfig, engine: StandInEngine) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, token="resume", channel=True)
    for _ in range(6):
        await asyncio.sleep(config.idle_s / 4)
        listener.send("session.update", voice="ryan")
        await listener.channel_event("session.updated")
    await asyncio.sleep(config.idle_s * 0.6)
    listener.send("ping")
    assert (await speaker.event("error"))["code"] == "session_idle"


@pytest.mark.parametrize(
    ("said", "code", "about"),
    [
        ("{", "malformed_event", "JSON"),
        ('{"type":"stats","rtp_time":"12"}', "invalid_event", "rtp_time"),
        ('{"type":"stats","rtp_time":-1}', "invalid_event", "rtp_time"),
        ('{"type":"stats","rtp_time":1,"age_ms":NaN}', "malformed_event", "JSON"),
        ('{"type":"stats","rtp_time":1,"age_ms":-5}', "invalid_event", "age_ms"),
        ('{"type":"stats","rtp_time":1,"received":1.5}', "invalid_event", "received"),
        ('{"type":"stats"}', "invalid_event", "rtp_time"),
        ('{"type":"playhead"}', "unknown_event", "stats, ping"),
        ("x" * 3000, "event_too_long", "2000"),
        (b"bytes", "malformed_event", "text"),
    ],
)
async def test_nonsense_is_answered_with_what_is_wrong(connect, listen, said, code: str, about: str) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    listener.channel.send(said)
    error = await listener.channel_event("error")
    assert error["code"] == code and about in error["message"]
    await speaker.say(SHORT)


async def test_a_flood_of_reports_does_no_harm(connect, listen, gateway) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    await start(speaker, TEXT)
    for _ in range(300):
        listener.report()
    done = await speaker.event("utterance.done")
    assert done["reason"] == "end"
    feedback = gateway.app[SESSIONS].by_token(speaker.created["token"]).listener.feedback
    assert 10 <= feedback.refused["too_many"] <= 300


async def test_a_listener_is_told_what_is_said(connect, listen) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True)
    listener.play()
    await asyncio.sleep(0.3)
    await start(speaker)
    started = await listener.channel_event("utterance.started")
    await until(lambda: listener.arrivals)
    assert started["rtp_time"] == listener.arrivals[0][1]
    await speaker.send("cancel")
    assert await listener.channel_event("utterance.cancelled") == await speaker.event("utterance.cancelled")


@pytest.mark.real_time
@pytest.mark.parametrize(("wish", "target"), [(None, "80"), ("4000", "400"), ("200", "200")])
async def test_as_much_is_sent_ahead_as_the_listener_is_told_to_hold(connect, gateway, listen, wish: str | None, target: str) -> None:
    peers = gateway.app[PEERS]
    peers._config = msgspec.structs.replace(peers._config, client_lead_s=0.4)
    speaker = await connect("webrtc")
    listener = await listen(speaker, headers={} if wish is None else {"Vivavoce-Max-Target-Ms": wish})
    assert listener.headers["Vivavoce-Target-Ms"] == target
    await speaker.say(TEXT)
    everything = sorted([*listener.silences, *listener.arrivals])
    ahead_ms = [(rtp - everything[0][1]) % 2**32 / 48 - (at - everything[0][0]) * 1000 for at, rtp in everything]
    steady = sorted(ahead_ms[25:])
    expected = int(target) - 40
    assert abs(steady[len(steady) // 2] - expected) < 15
    assert steady[len(steady) * 9 // 10] - steady[len(steady) // 10] < 25, "constant in a spurt"


@pytest.mark.real_time
@pytest.mark.parametrize("follows", [True, False])
async def test_who_holds_little_in_silence_is_sent_comfort_noise_then_and_more_ahead_when_speech_begins(connect, listen, follows: bool) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True, headers={"Vivavoce-Max-Target-Ms": "4000"})
    held = 80

    async def report(buffer_ms: int, times: int = 3, *, at_once: bool = False) -> None:
        """Plays each packet 80 ms after it came, or at once."""
        for _ in range(times):
            listener.playhead = max(listener.playhead, len(listener._packets) - (0 if at_once else 4))
            came_s = max([*listener.silences[-1:], *listener.arrivals[-1:]])[0]
            listener.report(buffer_ms=buffer_ms, target_ms=held, age_ms=(time.monotonic() - came_s) * 1000 if at_once else 0)
            await asyncio.sleep(0.2)

    await report(80)
    told = await listener.channel_event("hold")
    assert told["target_ms"] == 20
    held = told["target_ms"] if follows else held
    await report(30 if follows else 80)
    sent = len(listener.silences)
    await report(0, 10, at_once=follows)
    assert 8 <= len(listener.silences) - sent <= 15 if follows else len(listener.silences) - sent > 90
    await start(speaker, TEXT)
    await asyncio.sleep(0.3)
    everything = sorted([*listener.silences, *listener.arrivals])
    ahead_ms = {rtp: (rtp - everything[0][1]) % 2**32 / 48 - (at - everything[0][0]) * 1000 for at, rtp in everything}
    before = max(ahead_ms[rtp] for _, rtp in listener.silences[-5:])
    after = sorted(ahead_ms[rtp] for _, rtp in listener.arrivals[5:])[len(listener.arrivals) // 2 - 3]
    assert not follows or before < 15, "comfort noise has gone back to where its listener is"
    # A beginning goes back by up to a packet and a quarter, so that it is played at once; then it is sent up to 68 ms further ahead.
    assert 35 <= after - before <= 80 if follows else abs(after - before) < 15
    if not follows:
        return
    listener.events.clear()
    await report(70)
    assert (await listener.channel_event("hold"))["target_ms"] == 70, "what it has by then, and never more"
    held = 70
    await speaker.send("cancel")
    await speaker.event("utterance.cancelled")
    listener.events.clear()
    await report(70, times=round(FADES_S / 0.2) + 3)
    assert all(target_ms > 40 for target_ms in listener.told()), "it still plays as far behind as in speech"
    await report(0, 12, at_once=True)
    assert listener.told()[-1] == 20


@pytest.mark.real_time
@pytest.mark.parametrize("can_hold", [True, False])
async def test_who_can_be_told_to_hold_is_sent_comfort_noise_from_the_first_packet_on(connect, listen, engine: StandInEngine, can_hold: bool) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True, headers={"Vivavoce-Max-Target-Ms": "4000"} if can_hold else {})
    await asyncio.sleep(1.0)
    assert len(listener.silences) <= 8 if can_hold else len(listener.silences) > 40
    assert (await speaker.say(SHORT))["reason"] == "end"
    await asyncio.sleep(0.3)
    _, scores = align(listener.samples, bytes(engine.utterances[0].pcm))
    assert min(scores) >= 0.9


@pytest.mark.real_time
@pytest.mark.parametrize(("after_s", "stood_s"), [(0.1, 0.0), (0.4, 0.0), (1.0, 0.9)])
async def test_whose_output_sleeps_is_sent_one_packet_and_then_what_follows_where_it_is_when_it_wakes(
    connect, listen, after_s: float, stood_s: float
) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True, headers={"Vivavoce-Max-Target-Ms": "4000"})
    await speaker.send("text.append", text=TEXT)
    await speaker.send("text.end")
    await asyncio.sleep(after_s)
    assert not listener.arrivals and len(listener.silences) == 1, "its clock stands still"
    listener.playhead = 1
    # A long way to it tells nothing of its output: it is not said to have stood.
    listener.report(buffer_ms=0, target_ms=80, age_ms=60, stood_ms=stood_s * 1000)
    await speaker.event("utterance.started")
    await asyncio.sleep(0.2)
    (sent_s, rtp), (first_s, first_rtp), (fifth_s, fifth_rtp) = listener.silences[0], listener.arrivals[0], listener.arrivals[4]
    waits_s = (first_rtp - rtp) % 2**32 / 48000 - (first_s - sent_s - stood_s)
    assert -0.03 <= waits_s <= 0.05, "where it is, so that it plays it at once"
    assert (fifth_rtp - first_rtp) % 2**32 / 48000 - (fifth_s - first_s) > 0.04, "more of it at once, as for who has just come"


@pytest.mark.real_time
async def test_who_could_say_that_it_hears_and_does_not_is_spoken_to_after_a_while(connect, listen) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True, headers={"Vivavoce-Max-Target-Ms": "4000"})
    asked_s = time.monotonic()
    assert (await speaker.say(SHORT))["reason"] == "end"
    assert COLD_S - 0.5 <= listener.arrivals[0][0] - asked_s <= COLD_S + 0.5


async def test_who_never_says_that_it_hears_is_spoken_to_though_nothing_is_sent_meanwhile(connect, gateway, listen) -> None:
    sessions = gateway.app[SESSIONS]
    sessions._config = msgspec.structs.replace(sessions._config, awake_s=0.5)
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True, headers={"Vivavoce-Max-Target-Ms": "4000"})
    await asyncio.sleep(0.7)
    for _ in range(2):
        assert (await speaker.say(SHORT))["reason"] == "end"
        await asyncio.sleep(0.7)
    await until(lambda: len(listener.arrivals) > 10)


@pytest.mark.real_time
async def test_on_a_bad_network_silence_is_sent_like_sound(connect, listen) -> None:
    speaker = await connect("webrtc")
    listener = await listen(speaker, channel=True, headers={"Vivavoce-Max-Target-Ms": "4000"})
    for target_ms in (80, *[20] * 9):
        listener.playhead = max(listener.playhead, len(listener._packets) - 4)
        listener.report(buffer_ms=80, target_ms=target_ms, network_ms=100)
        await asyncio.sleep(0.2)
    assert listener.told() == [20]
    assert len([at for at, _ in listener.silences if at > time.monotonic() - 1.0]) > 40


async def test_a_target_that_is_no_number_is_refused(connect, gateway, listen) -> None:
    speaker = await connect("webrtc")
    headers = {"Authorization": f"Bearer {speaker.created['token']}", "Content-Type": "application/sdp", "Vivavoce-Max-Target-Ms": "plenty"}
    async with gateway.post("/v1/whep", data="v=0", headers=headers) as response:
        assert response.status == 400 and "Vivavoce-Max-Target-Ms" in (await response.json())["detail"]
