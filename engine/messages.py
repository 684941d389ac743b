"""Messages between engine process and client, msgpack over ZeroMQ: one struct each, decoded once at the socket.

A client (DEALER) numbers its own utterances; the engine (ROUTER) tells clients apart by their socket identity. The engine
picks a random `epoch` at start and says it in `Welcome`; commands that carry another epoch are answered with `Failed`.
Positions are samples at `EngineInfo.sample_rate`, counted from the utterance's first sample."""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn; None takes the checkpoint's generation_config.json.

    Ranges: temperatures 0.01 to 2, top_k from 1, top_p above 0 to 1, repetition_penalty 1 to 2, seed 0 to 2^63 - 1."""

    greedy: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    predictor_temperature: float | None = None
    predictor_top_k: int | None = None
    predictor_top_p: float | None = None
    seed: int | None = None


class SpeechRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One utterance to be spoken. Text follows in `Append` messages.

    `voice` None takes the checkpoint's first; `language` is a name the checkpoint lists or "auto". `live` says that text
    arrives while it is being spoken (end of speech is held back until `Finish`, design 3.2a). `pace` "live" makes audio at most
    a few seconds ahead of the listener, "file" as fast as spare capacity allows. `text_rate` is the sender's known speed in
    characters a second, None if unknown."""

    voice: str | None = None
    language: str = "auto"
    instructions: str = ""
    live: bool = True
    pace: str = "live"
    text_rate: float | None = None
    max_frames: int | None = None
    sampling: Sampling = Sampling()


class EngineInfo(msgspec.Struct, frozen=True):
    """What this engine speaks with."""

    model: str
    model_type: str
    voices: list[str]
    languages: list[str]
    sample_rate: int
    samples_per_frame: int
    max_text_chars: int
    device: str


# Commands: client to engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int = PROTOCOL_VERSION


class Open(msgspec.Struct, frozen=True, tag="open"):
    epoch: int
    utterance: int
    request: SpeechRequest


class Append(msgspec.Struct, frozen=True, tag="append"):
    epoch: int
    utterance: int
    text: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """No more text will come: speak to the end."""

    epoch: int
    utterance: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    epoch: int
    utterance: int


class Playback(msgspec.Struct, frozen=True, tag="playback"):
    """What the listener has heard: `heard` samples by now, and whether sound is running. `measured` is False for a server-side estimate."""

    epoch: int
    utterance: int
    heard: int
    playing: bool
    measured: bool


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """The consumer has taken `consumed` samples off the client's queue; the engine keeps at most a window beyond that in flight."""

    epoch: int
    utterance: int
    consumed: int


Command = Hello | Open | Append | Finish | Cancel | Playback | Credit


# Events: engine to client


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    epoch: int
    info: EngineInfo


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The utterance left the hold for enough text and entered the running batch."""

    epoch: int
    utterance: int


class AudioChunk(msgspec.Struct, frozen=True, tag="audio"):
    """`pcm`: s16le mono, starting at sample `position`. `text_until`: characters of the text the Talker had eaten by then,
    an upper bound of what is said in it."""

    epoch: int
    utterance: int
    position: int
    text_until: int
    pcm: bytes


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The last event of an utterance that was spoken.

    `reason`: "end" (the model ended its speech), "length" (the frame cap), "cancelled", or "idle" (live text stopped coming
    while it was needed: the words so far were spoken to their end, and text from character `text_until` on was not)."""

    epoch: int
    utterance: int
    reason: str
    samples: int
    text_until: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last event of an utterance that was refused or broke. `retry_after_s`: when trying again may help."""

    epoch: int
    utterance: int
    code: str
    message: str
    retryable: bool
    retry_after_s: float | None = None


Event = Welcome | Started | AudioChunk | Done | Failed

_encoder = msgspec.msgpack.Encoder()
decode_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
decode_event: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """One message as msgpack bytes."""
    return _encoder.encode(message)
