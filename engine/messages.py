"""Messages between engine process and client, msgpack over ZeroMQ: one struct each, decoded once at the socket.

A client (DEALER) numbers its own utterances; the engine (ROUTER) tells clients apart by their socket identity. The engine
picks a random `epoch` at start and says it in `Welcome`; commands that carry another epoch are answered with `Failed`. What
cannot be decoded fails the utterance it names.
Positions are samples at `EngineInfo.sample_rate`, counted from the utterance's first sample."""

from __future__ import annotations

import re

import msgspec

PROTOCOL_VERSION = 2


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
    """One utterance to be spoken. Text follows in `Append` messages; text that holds nothing to say is `Done` without sound.

    `whole_text` puts the text into the prompt as a whole (the reference's non_streaming_mode): speech begins when the text is finished.
    `voice` None takes the checkpoint's first; `language` is a name the checkpoint lists or "auto". `live` says that text
    arrives while it is being spoken (end of speech is held back until `Finish`, design 3.2a). `pace` "live" makes audio at most
    a few seconds ahead of the listener, "file" as fast as spare capacity allows. `text_rate` is the sender's known speed in
    characters a second, above 0, None if unknown. `max_frames` (80 ms each) cuts speech off, wherever it is in its text."""

    voice: str | None = None
    language: str = "auto"
    instructions: str = ""
    live: bool = True
    whole_text: bool = False
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
    takes_instructions: bool = False
    """Whether instructions change how it speaks."""


# Commands: client to engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int = PROTOCOL_VERSION


class Open(msgspec.Struct, frozen=True, omit_defaults=True, tag="open"):
    """Text that is there already comes with it, and no more will if it is `finished`: messages of their own come later, by what it takes to
    wake the engine."""

    epoch: int
    utterance: int
    request: SpeechRequest
    text: str = ""
    finished: bool = False


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


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Answered with Stats."""


Command = Hello | Open | Append | Finish | Cancel | Playback | Credit | Inspect


# Events: engine to client


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    epoch: int
    info: EngineInfo


class Unwelcome(msgspec.Struct, frozen=True, tag="unwelcome"):
    """The answer to a Hello of another protocol version: nothing else will be understood. `version` is the engine's."""

    version: int


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


WENT_WRONG = ("runaway", "silence", "repetition")
"""Reasons of `Done` after which some of the words that the voice was given may not have been said."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The last event of an utterance that was spoken.

    `reason`: "end" (the model ended its speech); "empty" (nothing in the text can be said: no sound was made); "cancelled";
    "idle" (live text stopped coming while it was needed); "length" (the text was longer than one utterance may be, or `max_frames`
    was reached); "runaway", "silence" or "repetition" (the voice had gone wrong). After "idle", and after "length" without
    `max_frames`, the words up to character `text_until` were spoken to their end and those from there on were not: send them as the
    next utterance."""

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


class StageStats(msgspec.Struct, frozen=True):
    """What one stage has done: `sizes` counts its launches by the rows they had, `seconds` is the time they took together."""

    stage: str
    sizes: dict[int, int]
    seconds: float


class StageCost(msgspec.Struct, frozen=True):
    """What a launch of up to `rows` rows, and for the codec of `frames` frames each, takes at present."""

    stage: str
    rows: int
    frames: int
    seconds: float


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """How the engine is doing; counts are since its start. `waiting` utterances have no slot yet.

    `slack_counts[i]` live chunks were ready at most `slack_bounds[i]` seconds, and more than the bound before, ahead of the moment
    their listener would have run dry (negative: after it); the last count is of those beyond all bounds, `slack_sum` their total.
    `host_seconds`: what the engine's own thread took for all launches together, beside the device."""

    epoch: int
    slots: int
    slots_used: int
    waiting: int
    stages: list[StageStats]
    costs: list[StageCost]
    slack_bounds: list[float]
    slack_counts: list[int]
    slack_sum: float
    host_seconds: float = 0.0


Event = Welcome | Unwelcome | Started | AudioChunk | Done | Failed | Stats


class Address(msgspec.Struct, frozen=True):
    """Whose a command is: what can be read of one whose other fields are wrong."""

    type: str
    epoch: int
    utterance: int


_encoder = msgspec.msgpack.Encoder()
decode_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
decode_address = msgspec.msgpack.Decoder(Address)
decode_event: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """One message as msgpack bytes."""
    return _encoder.encode(message)


def explain(command: str, error: msgspec.DecodeError) -> str:
    """What is wrong with a command that could not be decoded: field, what it should be, what it is."""
    text = str(error)
    if (found := re.fullmatch(r"(.*) - at `\$\.(?:request\.)?(?:sampling\.)?(.*)`", text)) is not None:
        return f"{found[2]}: {found[1][0].lower()}{found[1][1:]}"
    return f"{command[:60]}: {text[0].lower()}{text[1:]}"
