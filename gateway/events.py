"""The native protocol, version 1: one typed event a message, JSON with the event's name in `type`.

A client sends `ClientEvent`s and receives `ServerEvent`s. Unknown fields are ignored. `utterance` counts from 1 within a
session, in speaking order. Characters are Unicode code points."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Literal, get_args

import msgspec

from gateway.rtc.turn import IceServer

AudioFormat = Literal["pcm_s16le", "webrtc"]
Pace = Literal["live", "file"]
Policy = Literal["queue", "replace", "mix"]
Listeners = Literal["replace", "refuse"]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Audio(msgspec.Struct, frozen=True):
    """How the session is heard: raw 24 kHz mono PCM in this WebSocket's binary frames, or Opus to the WHEP listener. `pace` "file" is
    for PCM that nobody waits for: as fast as live listeners leave room for it, and not only a few seconds ahead of hearing."""

    format: AudioFormat
    pace: Pace = "live"


class Text(msgspec.Struct, frozen=True):
    """What is made of the text: `clean` leaves out Markdown, HTML tags, emoji and control characters (gateway.text)."""

    clean: bool


# Client events


class SessionUpdate(msgspec.Struct, frozen=True, tag="session.update"):
    """Set up the session, or change it from the next utterance on. Fields left out keep their value.

    `policy`: what a new text (the first, and each after a text.end) does to what is being spoken. queue: it waits for its end; replace: it
    takes its place, as with `interrupt`; mix: it sounds at once with it, to a WebRTC listener. `listeners`: what a WebRTC listener does
    that comes while another is there: it takes its place, or is refused."""

    voice: str | None = None
    language: str | None = None
    instructions: str | None = None
    audio: Audio | None = None
    text: Text | None = None
    policy: Policy | None = None
    listeners: Listeners | None = None


class TextAppend(msgspec.Struct, frozen=True, tag="text.append"):
    """More text, as it is written. An empty text is legal and does nothing. `interrupt`: everything before it is cancelled first."""

    text: str
    interrupt: bool = False


class TextFlush(msgspec.Struct, frozen=True, tag="text.flush"):
    """Speak what is here to its end now; later text opens the next utterance."""


class TextEnd(msgspec.Struct, frozen=True, tag="text.end"):
    """The text of this utterance is complete; later text opens the next utterance."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop speaking: the given utterance and all later ones, or everything. With the policy `mix`, the given utterance and the rest of its
    text. One that is over already is left alone."""

    utterance: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Played(msgspec.Struct, frozen=True, tag="playback"):
    """How far a listener of PCM has played `utterance`, and what it has in hand behind that, a few times a second. Until the next one it is
    taken to play on, or to stand still if it says the same again."""

    utterance: Annotated[int, msgspec.Meta(ge=1)]
    played_ms: NotNegative
    buffered_ms: NotNegative = 0.0


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered with `pong`."""


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """A WebRTC listener's playback, on its data channel `events`, five times a second. Counters run from its connection on.

    `rtp_time`: the RTP timestamp of the packet it played last, `age_ms` ago; None: none yet. `received`: packets. `concealed_ms`: sound
    it made up for want of packets, silence excepted. `buffer_ms`: the depth of its jitter buffer, `target_ms` what it is told to hold,
    `network_ms` what it would hold for the network's sake alone (None: it cannot say, or played nothing since its last report).
    `rtt_ms`: from its `ping` to our `pong`. `paused`: what it receives it plays to nobody, so speech is to wait. `stood_ms`, of the first
    report: how long its sound output stood still since that packet came; `age_ms` is without that."""

    rtp_time: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None
    age_ms: NotNegative = 0.0
    received: Annotated[int, msgspec.Meta(ge=0)] = 0
    concealed_ms: NotNegative = 0.0
    buffer_ms: NotNegative = 0.0
    target_ms: NotNegative | None = None
    network_ms: NotNegative | None = None
    rtt_ms: NotNegative | None = None
    paused: bool = False
    stood_ms: NotNegative = 0.0


ListenerEvent = Stats | Ping
"""What somebody who only listens may send, on the data channel."""
ClientEvent = SessionUpdate | TextAppend | TextFlush | TextEnd | Cancel | Played | Ping
CLIENT_EVENTS = (SessionUpdate, TextAppend, TextFlush, TextEnd, Cancel, Played, Ping)
LISTENER_EVENTS = (Stats, Ping)


# Server events


class SessionCreated(msgspec.Struct, frozen=True, tag="session.created"):
    """The first event. Whoever has `token` may listen to this session by posting an offer to `whep`; `ice_servers` is what its
    RTCPeerConnection needs to get through to the gateway. Whoever has `resume` may take it over when its WebSocket has broken; that is for
    its owner alone."""

    session: str
    token: str
    resume: str
    whep: str
    ice_servers: list[IceServer]


class SessionResumed(msgspec.Struct, frozen=True, tag="session.resumed"):
    """The first event on a socket that takes the session over. `received`: how many of the client's messages were acted on, over all sockets;
    those behind are to be sent again. Then comes what the client did not get."""

    session: str
    received: int


class SessionUpdated(msgspec.Struct, frozen=True, tag="session.updated"):
    """The settings in force, and what the checkpoint offers."""

    voice: str | None
    language: str
    instructions: str
    audio: Audio
    text: Text
    policy: Policy
    listeners: Listeners
    voices: list[str]
    languages: list[str]


class UtteranceStarted(msgspec.Struct, frozen=True, tag="utterance.started"):
    """Its first audio has left. `ttfa_ms` counts from the receipt of its first text. `rtp_time` is the RTP timestamp of its first packet,
    where the WebRTC listener's clock is known."""

    utterance: int
    ttfa_ms: float
    rtp_time: int | None = None


class UtteranceProgress(msgspec.Struct, frozen=True, tag="utterance.progress"):
    """How far the listener is: audio heard, and an estimate of the characters heard, cut back to a word's end."""

    utterance: int
    spoken_ms: int
    text_until: int


class UtteranceDone(msgspec.Struct, frozen=True, tag="utterance.done"):
    """All its audio has been sent. `reason`: end; idle or length (the text stopped coming, or is too long for one utterance:
    the rest follows as the next); unheard (nobody listened any more: the rest follows when somebody does); empty (nothing in it can be
    said); silence, repetition or runaway (the voice had gone wrong); or error."""

    utterance: int
    reason: str
    duration_ms: int
    text: str


class UtteranceCancelled(msgspec.Struct, frozen=True, tag="utterance.cancelled"):
    """It was stopped by `cancel`; no audio of it follows. `measured`: the listener itself has told where it is; otherwise that is an
    estimate, as `heard_text` is always, which ends with a word. It may come after `utterance.done`, while the listener still has some of
    it to hear. `rtp_until` is the RTP timestamp behind all that was sent, where the WebRTC listener's clock is known: from there on it hears
    nothing of this."""

    utterance: int
    heard_ms: int
    heard_text: str
    measured: bool = False
    rtp_until: int | None = None


class Playback(msgspec.Struct, frozen=True, tag="playback"):
    """What the listener has in hand, five times a second while something is spoken: `buffered_ms` of speech at its end, dry in `dry_in_ms`
    with what waits here. `concealed_ms`: what it had to make up in mid-speech so far. `measured`: by its own word, or else by estimate."""

    utterance: int
    buffered_ms: int
    dry_in_ms: int
    concealed_ms: int
    measured: bool


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """To a WebRTC listener that reports, on its data channel: how much sound it is to hold from now on, as jitterBufferTarget. Little in
    silence, more in speech, for which as much is sent ahead; one that does not follow is sent sound as if it had not been told."""

    target_ms: int


class Error(msgspec.Struct, frozen=True, tag="error", omit_defaults=True):
    """Something was refused or failed; the session goes on. `retryable` says whether the same may succeed later."""

    code: str
    message: str
    retryable: bool
    utterance: int | None = None

    # `retryable` has no default, so that it is always on the wire.


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to `ping`."""


ServerEvent = (
    SessionCreated
    | SessionResumed
    | SessionUpdated
    | UtteranceStarted
    | UtteranceProgress
    | UtteranceDone
    | UtteranceCancelled
    | Playback
    | Hold
    | Error
    | Pong
)


class EventError(Exception):
    """An event that cannot be acted on; goes to the client as `error`."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable

    def event(self) -> Error:
        """Its form on the wire."""
        return Error(self.code, str(self), self.retryable)


class _Tag(msgspec.Struct, frozen=True):
    type: str


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[ClientEvent] = msgspec.json.Decoder(ClientEvent)
_listener_decoder: msgspec.json.Decoder[ListenerEvent] = msgspec.json.Decoder(ListenerEvent)
_tag_decoder = msgspec.json.Decoder(_Tag)
_CHOICES = {"audio.format": AudioFormat, "audio.pace": Pace, "policy": Policy, "listeners": Listeners}
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def _tags(events: Iterable[type[msgspec.Struct]]) -> list[str]:
    return [str(event.__struct_config__.tag) for event in events]


_names = _tags(CLIENT_EVENTS)
_listener_names = _tags(LISTENER_EVENTS)


def encode(event: ServerEvent) -> str:
    """One event as JSON text."""
    return _encoder.encode(event).decode()


def decode(message: str) -> ClientEvent:
    """One client event; the text of `text.append` may hold halves of surrogate pairs. Raises EventError: malformed_event,
    unknown_event or invalid_event."""
    try:
        return _halved(message) if _HALF_ESCAPE.search(message) else _decoder.decode(message)
    except msgspec.ValidationError as error:
        raise _explain(_HALF_ESCAPE.sub("?", message), error) from error
    except (ValueError, RecursionError) as error:
        raise EventError("malformed_event", f"not JSON: {error}") from error


def decode_listener(message: str) -> ListenerEvent:
    """One event of somebody who only listens. Raises EventError, also for what only the session's owner may send."""
    try:
        return _listener_decoder.decode(message)
    except msgspec.ValidationError as error:
        refusal = _explain(message, error, LISTENER_EVENTS)
        if refusal.code == "unknown_event" and _tag_decoder.decode(message).type in _names:
            what = "a listener's channel takes stats and ping; text and everything else go through the session's WebSocket"
            raise EventError("not_allowed", what) from error
        raise refusal from error
    except (ValueError, RecursionError) as error:
        raise EventError("malformed_event", f"not JSON: {error}") from error


def is_listeners(message: str) -> bool:
    """Whether a message is meant to be one of a listener's events. False also for what is no event."""
    try:
        return _tag_decoder.decode(_HALF_ESCAPE.sub("?", message)).type in _listener_names
    except (ValueError, RecursionError):
        return False


def _halved(message: str) -> ClientEvent:
    """As `decode`, where a pair may have been cut in two, which msgspec takes for broken JSON."""
    event: ClientEvent = msgspec.convert(json.loads(message), ClientEvent)
    if not isinstance(event, TextAppend):
        try:
            _encoder.encode(event)
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise EventError("invalid_event", f"{event.__struct_config__.tag}: {half} is half of a surrogate pair; send both halves") from error
    return event


def _explain(message: str, error: msgspec.ValidationError, events: Iterable[type[msgspec.Struct]] = CLIENT_EVENTS) -> EventError:
    try:
        name = _tag_decoder.decode(message).type
    except msgspec.DecodeError:
        return EventError("malformed_event", "an event is a JSON object with a string `type`")
    known = _tags(events)
    if name not in known:
        return EventError("unknown_event", f"no event is called {name[:60]!r}; known: {', '.join(known)}")
    choices = next((get_args(kind) for field, kind in _CHOICES.items() if f"$.{field}`" in str(error)), ())
    valid = f"; valid: {', '.join(choices)}" if "enum value" in str(error) else ""
    return EventError("invalid_event", f"{name}: {str(error).replace('`$.', '`')}{valid}")
